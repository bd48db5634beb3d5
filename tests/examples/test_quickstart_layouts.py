"""The quickstart recipe's curve on shared tensors, sequences and experts is that of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.e2e.runs import steps, train

RECIPE = ROOT / "examples" / "quickstart" / "recipe.yaml"
# Fewer files and shorter rows than the recipe's; the model, its rates and its schedule are the recipe's own.
SHORT = (
    "--training.stop_after=8",
    "--dataset.max_files=40",
    "--dataset.max_seq_len=64",
    "--dataset.tokenizer=bytes",
    "--lr_scheduler.warmup_steps=4",
    "--evaluation.at_end=false",
    "--checkpoint.save_last=false",
)
LAYOUTS = {
    "tp 2 x cp 2": (4, ["--accelerator.tp_size=2", "--accelerator.cp_size=2"]),
    "ep 2": (2, ["--accelerator.ep_size=2", "--training.micro_batch_size=4"]),
}


@pytest.mark.layouts
def test_the_curve_is_that_of_one_process(tmp_path: Path) -> None:
    """The warm-up is cut short as well, so that the last steps have the highest rate."""
    alone = train(RECIPE, *SHORT, out=tmp_path / "alone")
    assert len(steps(alone)) == 8
    for name, (nproc, overrides) in LAYOUTS.items():
        rows = train(RECIPE, *SHORT, *overrides, nproc=nproc, out=tmp_path / name.replace(" ", ""))
        assert steps(rows) == pytest.approx(steps(alone), abs=1e-4), name
        assert steps(rows, "tokens") == steps(alone, "tokens")
