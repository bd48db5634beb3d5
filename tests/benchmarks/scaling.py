"""Tokens per second on 2 and 4 ranks over one, on the same cores, and the collectives of each step.

The global batch is the same, so the work is; ranks share the cores, so the best there can be is 1.0. What is lost is
the cost of sharding: gathering weights, summing gradients, and ranks that wait for each other. Runs take a step each
by turns. The collectives are counted in runs of their own, in steps that log nothing and in those that do.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.count_plugin import RESULTS
from tests.benchmarks.peers import tiny_spec, write_recipe
from tests.benchmarks.turns import alternate, hp_train, ratios

NUM_STEPS = 60
NUM_WARM_UP = 10
LAYOUTS = {
    "ranks_1": ("--nproc=1",),
    "ranks_2": ("--nproc=2",),
    "ranks_4": ("--nproc=4",),
    "ranks_2_tp_2": ("--nproc=2", "--accelerator.tp_size=2"),
}
COUNTED_STEPS = 6


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hp-scaling-") as name:
        folder = Path(name)
        recipe = write_recipe(folder, tiny_spec(folder, NUM_STEPS))
        env = {**os.environ, "HP_CACHE_DIR": str(folder / "cache")}
        one_row = "--training.micro_batch_size=1"
        commands = {
            name: hp_train(recipe, f"--output_dir={folder / name}", one_row, *options)
            for name, options in LAYOUTS.items()
        }
        found = alternate(commands, env)
        collectives = {name: count(recipe, folder, options, env) for name, options in LAYOUTS.items()}
    against = ratios(found, "ranks_1", NUM_WARM_UP)
    return {
        "tokens_per_second_ratio": {name: round(1 / one["median_of_pairs"], 4) for name, one in against.items()},
        "step_ms": {name: round(1000 * median(one.steps[NUM_WARM_UP:]), 2) for name, one in found.items()},
        "collectives_per_step": collectives,
    }


def count(recipe: Path, folder: Path, options: Sequence[str], env: dict[str, str]) -> dict[str, dict[str, int]]:
    """The collectives of a step that doesn't log and of one that does."""
    run = folder / f"counted{'_'.join(options)}"
    settings = (f"--training.train_iters={COUNTED_STEPS}", "--training.log_every=4", "--training.micro_batch_size=1")
    # A peak that is measured is exchanged after the first row.
    settings += ("--training.device_peak_tflops=1",)
    command = hp_train(recipe, f"--output_dir={run}", *settings, *options, plugin="count_plugin.py")
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    steps = json.loads((run / RESULTS).read_text())
    return {"quiet_step": steps[2], "logged_step": steps[3]}
