"""Whole runs from a recipe, in forked ranks or in a process of their own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from hp_core.cli.main import main
from hp_core.observe.trackers import read_metrics
from hp_core.testing.ranks import PRELOAD, run_ranks
from tests.conftest import ROOT

WITH_COMPONENTS = (
    *PRELOAD,
    "hp_plugins.trainers.text",
    "hp_plugins.models.causal_lm",
    "hp_plugins.losses.causal_lm",
    "hp_plugins.optimizers.muon",
    "hp_plugins.optimizers.sgd",
    "hp_plugins.schedulers.schedules",
    "hp_plugins.dataloaders.torch_loader",
)

RECIPE = """\
model:
  name: causal_lm
  config:
    model_type: {model_type}
    vocab_size: 96
    hidden_size: 32
    intermediate_size: 48
    num_hidden_layers: 2
    num_attention_heads: 4
    num_key_value_heads: 2
    head_dim: 8
    max_position_embeddings: 64
dataset:
  _target_: tests.e2e.parts.numbered_rows
optimizer: {{name: adamw, lr: 1e-2}}
training:
  train_iters: 6
  global_batch_size: 4
  seed: 3
output_dir: {output_dir}
"""


def recipe(tmp_path: Path, model_type: str = "llama", extra: str = "") -> Path:
    """A tiny recipe on numbered rows; its run goes to `tmp_path / "run"` unless overridden."""
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE.format(model_type=model_type, output_dir=tmp_path / "run") + extra)
    return path


def train_here(environment: Any, path: str, overrides: list[str], plugins: tuple[str, ...] = ()) -> dict[str, Any]:
    """One rank's run; returns its report as plain data."""
    from hp_core.config import load_recipe
    from hp_core.training.session import train

    report = train(load_recipe(path, overrides), environment=environment, extra_plugins=plugins)
    return {"steps": report.steps, "metrics": dict(report.metrics), "evaluation": report.evaluation}


def train(path: Path, *overrides: str, nproc: int = 1, out: Path | None = None) -> list[dict[str, Any]]:
    """Run the recipe on `nproc` gloo ranks and return the rows of its metrics file."""
    arguments = list(overrides) + ([f"--output_dir={out}"] if out is not None else [])
    run_ranks(train_here, nproc, str(path), arguments, preload=WITH_COMPONENTS)
    return read_metrics(out if out is not None else path.parent / "run")


def steps(rows: list[dict[str, Any]], name: str = "loss") -> list[Any]:
    """One metric of the logged steps, in order; evaluations are left out."""
    return [row[name] for row in rows if name in row and not {"eval_loss", "test_loss"} & set(row)]


def hp_train(
    *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`hp-train` as a user calls it."""
    return captured([sys.executable, "-m", "hp_core", *arguments], cwd=cwd, env=env)


def captured(
    command: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None, timeout: float = 180
) -> subprocess.CompletedProcess[str]:
    """What a command that has to do with the checkout says."""
    return subprocess.run(
        command,
        cwd=cwd or ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def hp_train_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`hp-train` in this process, which saves the seconds that importing torch takes; one rank only."""
    path = list(sys.path)
    stdout, stderr = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(stdout), redirect_stderr(stderr):
            code = main(arguments)
    finally:
        sys.path[:] = path
    return subprocess.CompletedProcess(arguments, code, stdout.getvalue(), stderr.getvalue())


def manifest(run: Path) -> dict[str, Any]:
    """The run's manifest."""
    return json.loads((run / "manifest.json").read_text())
