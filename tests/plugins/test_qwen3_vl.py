"""The recipes of the Qwen3-VL families, as their headers say to run them on the pictures of the example."""

from __future__ import annotations

import re
import shlex
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from hp_core.observe.trackers import read_metrics
from hp_core.testing.ranks import run_ranks
from tests.conftest import ROOT
from tests.e2e.runs import WITH_COMPONENTS, captured, hp_train_here, manifest, steps, train_here

FAMILIES = ("qwen3_vl", "qwen3_vl_moe")
# In fp32, so that only the order of sums is left to differ, and few steps.
EXACT = {
    "mixed_precision": "{param_dtype: null, reduce_dtype: null}",
    "training.train_iters": "4",
    "lr_scheduler.warmup_steps": "0",
    # Adam's first steps are as large for a gradient that is all rounding.
    "optimizer.eps": "1e-6",
    "checkpoint": "{save_every: 0, save_last: false}",
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    made = captured([sys.executable, str(ROOT / "examples/qwen3_vl_tiny/prepare.py")], cwd=folder, timeout=300)
    assert made.returncode == 0, made.stderr
    return folder


def header_command(family: str) -> list[str]:
    """The arguments of the command in the recipe's header that runs it here."""
    recipe = Path(str(files(f"hp_plugins.models.{family}.recipes") / "train.yaml"))
    line = next(line for line in recipe.read_text().splitlines() if "--model.pretrained=null" in line)
    program, named, *overrides = shlex.split(line.removeprefix("#"))
    assert program == "hp-train"
    assert recipe.as_posix().endswith(named)
    return [str(recipe), *overrides]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_recipe_runs_as_its_header_says(
    family: str, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pictures)
    done = hp_train_here(*header_command(family), f"--output_dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    assert re.search(r"train data: .* documents with [0-9,]+ images", done.stdout)
    losses = steps(read_metrics(tmp_path / "run"))
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("family", FAMILIES)
def test_its_replacements_and_ranks_change_no_number(
    family: str, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pictures)
    path, *overrides = header_command(family)
    kept = [one for one in overrides if one.removeprefix("--").partition("=")[0] not in EXACT]
    overrides = [*kept, *(f"--{name}={value}" for name, value in EXACT.items())]
    for name, more in (("plain", ["--plan_overrides=[]"]), ("one", [])):
        assert hp_train_here(path, *overrides, *more, f"--output_dir={tmp_path / name}").returncode == 0
    run_ranks(train_here, 2, path, [*overrides, f"--output_dir={tmp_path / 'two'}"], preload=WITH_COMPONENTS)
    losses = {name: steps(read_metrics(tmp_path / name)) for name in ("plain", "one", "two")}
    assert losses["one"] == pytest.approx(losses["plain"], abs=5e-6)
    assert losses["two"] == pytest.approx(losses["plain"], abs=2e-5)
    norms, others = (rule["modules"] for rule in manifest(tmp_path / "two")["replaced_modules"])
    layers = [f"model.language_model.layers.{layer}" for layer in (0, 1)]
    assert sorted(norms) == [f"{layer}.{name}_layernorm" for layer in layers for name in ("input", "post_attention")]
    assert len(others) == 2
