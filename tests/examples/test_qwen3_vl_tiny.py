"""A tiny Qwen3-VL names shapes: the example's commands as written, and what comes of them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hp_core.observe.trackers import read_metrics
from tests.conftest import ROOT
from tests.e2e.runs import captured

EXAMPLE = ROOT / "examples" / "qwen3_vl_tiny"


def commands() -> list[str]:
    """Those of the README, which are the recipe's own."""
    block = re.search(r"```sh\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.S)
    assert block is not None
    found = block.group(1).splitlines()
    told = re.findall(r"^#   (.*)$", (EXAMPLE / "recipe.yaml").read_text(), re.M)
    assert found == told
    return found


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    first, *rest = shlex.split(command.replace("examples/qwen3_vl_tiny", str(EXAMPLE)))
    program = [sys.executable] if first == "python" else [sys.executable, "-m", "hp_core"]
    return captured([*program, *rest], cwd=folder, timeout=900)


@pytest.mark.slow
def test_the_commands_of_the_readme(tmp_path: Path) -> None:
    outputs = {}
    for command in commands():
        done = run(command, tmp_path)
        assert done.returncode == 0, done.stderr
        outputs[command] = done.stdout
    assert "<|image_pad|>×9" in outputs["hp-train data examples/qwen3_vl_tiny/recipe.yaml"]
    rows = read_metrics(tmp_path / "runs" / "qwen3_vl_tiny")
    losses = [row["eval_loss"] for row in rows if "eval_loss" in row]
    # Of 600 steps; a small model that knows its pictures may do a little worse on others at the end.
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    right = json.loads(outputs["python examples/qwen3_vl_tiny/accuracy.py"].splitlines()[-1])
    # By chance a sixth and a quarter.
    assert right["shape"] > 0.5
    assert right["color"] > 0.9


def test_a_short_run_learns_to_tell_colours_apart(tmp_path: Path) -> None:
    prepare, data, train, export, accuracy = commands()
    short = "--training.train_iters=60 --lr_scheduler.name=constant --evaluation.every=30 --dataloader.num_workers=0"
    for command in (prepare, data, f"{train} {short}", export):
        done = run(command, tmp_path)
        assert done.returncode == 0, done.stderr
    first, last = (row["eval_loss"] for row in read_metrics(tmp_path / "runs/qwen3_vl_tiny") if "eval_loss" in row)
    assert last < first
    asked = run(accuracy, tmp_path)
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout.splitlines()[-1])["color"] > 0.4
