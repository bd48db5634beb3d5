"""The fixtures, as an author's tests use them: no import, whole runs, several ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hp_core
from hp_core import InputError, RunError
from hp_core.testing import TINY_RECIPE
from hp_core.testing.ranks import RankError
from hp_core.testing.setups import tiny_setup

LOSS = """\
import torch.distributed as dist
from hp_core import ModelOutputLoss, RunError


class Breaks(ModelOutputLoss):
    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def forward(self, *, model_output, labels):
        # A fault before the first step would be told as one of the recipe's.
        if self.training and dist.get_rank() == dist.get_world_size() - 1:
            raise RunError("no more") if self.kind == "run" else ValueError("a bug")
        return model_output.loss
"""


def test_a_run_in_this_process(hp_run: Any, tmp_path: Path) -> None:
    run = hp_run(TINY_RECIPE, "training.train_iters=2", "--evaluation.every=1")
    assert run.directory == tmp_path / "run"
    assert [row["step"] for row in run.rows] == [1, 1, 2, 2]
    assert run.losses == [row["loss"] for row in run.rows if "loss" in row]
    assert len(run.losses) == 2
    assert run.report.steps == 2
    assert run.report.evaluation["eval_loss"] == run.rows[-1]["eval_loss"]
    assert run.manifest["seed"] == 3
    assert run.manifest["world"]["size"] == 1


def test_ranks_give_the_same_losses_in_a_directory_of_their_own(hp_run: Any, tmp_path: Path) -> None:
    alone = hp_run(TINY_RECIPE)
    two = hp_run(TINY_RECIPE, nproc=2)
    assert two.directory == tmp_path / "run-2"
    assert two.losses == pytest.approx(alone.losses, abs=1e-5)
    assert two.manifest["world"]["size"] == 2
    assert two.report.steps == 3


def test_a_run_can_be_continued(hp_run: Any, tmp_path: Path) -> None:
    whole = hp_run(TINY_RECIPE)
    first = hp_run(TINY_RECIPE, "training.stop_after=2", f"output_dir={tmp_path / 'mine'}")
    assert len(first.losses) == 2
    second = hp_run(TINY_RECIPE, "checkpoint.resume=latest", f"output_dir={first.directory}")
    assert second.losses == whole.losses


def test_a_plugin_of_one_file_lies_beside_the_recipe(hp_run: Any, tmp_path: Path) -> None:
    (tmp_path / "note.py").write_text(
        "from hp_core import hookimpl\n@hookimpl\ndef on_train_end(run, report):\n    run.record(note=report.steps)\n"
    )
    assert hp_run(f"{TINY_RECIPE}plugins: [note.py]\n").manifest["note"] == 3


@pytest.mark.parametrize("nproc", [1, 2])
def test_what_a_user_would_read_is_an_input_error(hp_run: Any, nproc: int, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        hp_run(f"{TINY_RECIPE}loss: 1\n", "training.sede=1", nproc=nproc)
    assert len(caught.value.problems) == 2
    assert "did you mean 'seed'?" in str(caught.value)
    with pytest.raises(InputError, match="hiden_size: unknown key"):
        hp_run(TINY_RECIPE, "model.config.hiden_size=3", nproc=nproc)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_that_fails_says_why(hp_run: Any, nproc: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"losses_that_break_{nproc}"
    (tmp_path / f"{name}.py").write_text(LOSS)
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = f"{TINY_RECIPE}loss_fn: {{_target_: {name}.Breaks, kind: run}}\n"
    with pytest.raises(RunError, match="no more"):
        hp_run(recipe, nproc=nproc)
    with pytest.raises(ValueError if nproc == 1 else RankError, match="a bug"):
        hp_run(recipe, "loss_fn.kind=bug", nproc=nproc)


def test_a_run_leaves_this_process_as_it_was(hp_run: Any) -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    expected = torch.rand(1), np.random.rand()
    torch.manual_seed(5)
    np.random.seed(5)
    path = list(sys.path)
    hp_run(TINY_RECIPE, "training.train_iters=1", "training.enable_full_determinism=true")
    assert (torch.rand(1), np.random.rand()) == expected
    assert sys.path == path
    assert not torch.are_deterministic_algorithms_enabled()


def ranks_and(environment: Any, number: int) -> tuple[int, float]:
    with tiny_setup(environment) as setup:
        total = torch.tensor(float(number + setup.rank))
        dist.all_reduce(total)
        return setup.rank, float(total)


def test_ranks_return_what_the_function_does(hp_ranks: Any) -> None:
    assert hp_ranks(ranks_and, 2, 10) == [(0, 21.0), (1, 21.0)]


AUTHOR = """\
import sys

assert "torch" not in sys.modules  # the fixtures alone are no reason to import it


def test_a_run(hp_run):
    from hp_core.testing import TINY_RECIPE

    assert len(hp_run(TINY_RECIPE).losses) == 3
"""


def test_an_author_s_project_needs_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(AUTHOR)
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "--strict-markers"]
    done = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_only_the_kit_needs_pytest() -> None:
    sources = {
        path: path.read_text() for path in Path(hp_core.__file__).parent.rglob("*.py") if path.parent.name != "testing"
    }
    assert len(sources) > 50
    pattern = re.compile(r"^\s*(import|from) (pytest|hp_core\.testing)\b", re.MULTILINE)
    found = [str(path) for path, text in sources.items() if pattern.search(text)]
    assert found == []
