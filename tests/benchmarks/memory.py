"""What checkpointing and swapping of activations save of the device's memory and cost in time, and whether a run grows.

A small Qwen3 runs forward and backward without either, with each, and with both; a step of each in turn, so that
whatever else the machine does hits all alike. `saved_bytes_ratio_*` is what the layers' forward pass leaves on the
device over what it leaves without, `..._with_head` the same with the logits and the loss; `time_ratio_*` is the same of
the time of a step. On the CPU swapping copies within one memory: its bytes count, its time tells little.

The growth of a process is that of its resident memory over the last 150 of 200 steps of `hp-train` with the same model,
what was freed given back to the system before each measurement.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from hp_core.config.memory import ActivationCheckpointConfig, ActivationSwapConfig
from hp_core.model.saved_bytes import SavedBytes, saved_bytes
from tests.benchmarks.memory_watch import RESULTS
from tests.benchmarks.overhead import RECIPE
from tests.benchmarks.peers import MODEL
from tests.model.tiny import QWEN3, a_setup, build

ROWS, TOKENS = 4, 256
CONFIG = {**QWEN3, **MODEL}
NUM_WARM_UP, NUM_ROUNDS = 2, 10
GOALS = {"full": 0.15, "swap": 0.15}
MAX_GROWTH_BYTES = 2**20

_HOST = ActivationSwapConfig(mode="host")
VARIANTS: dict[str, dict[str, Any]] = {
    "off": {},
    "full": {"activation_checkpoint": ActivationCheckpointConfig(mode="full")},
    "every_2": {"activation_checkpoint": ActivationCheckpointConfig(mode="every_n", n=2)},
    "selective": {"activation_checkpoint": ActivationCheckpointConfig(mode="selective")},
    "swap": {"activation_swap": _HOST},
    "full_swap": {"activation_checkpoint": ActivationCheckpointConfig(mode="full"), "activation_swap": _HOST},
}


def measure() -> dict[str, Any]:
    saved, times = steps()
    layers = {name: one.layers.device / saved["off"].layers.device for name, one in saved.items()}
    whole = {name: one.whole.device / saved["off"].whole.device for name, one in saved.items()}
    growth = growth_of_a_run()
    reached = all(layers[name] <= goal for name, goal in GOALS.items())
    return {
        **{f"saved_bytes_ratio_{name}": round(ratio, 4) for name, ratio in layers.items() if name != "off"},
        **{f"saved_bytes_ratio_{name}_with_head": round(ratio, 4) for name, ratio in whole.items() if name != "off"},
        **{f"time_ratio_{name}": round(one / times["off"], 3) for name, one in times.items() if name != "off"},
        "saved_bytes_off": saved["off"].layers.device,
        "host_bytes_swap": saved["swap"].layers.host,
        "host_bytes_full_swap": saved["full_swap"].layers.host,
        "step_ms_off": round(1e3 * times["off"], 2),
        "goals": GOALS,
        **growth,
        "reached": reached and growth["growth_bytes"] <= MAX_GROWTH_BYTES,
    }


class Variant:
    """A model, and what its forward pass keeps in the layers and with head and loss."""

    def __init__(self, model: Any) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, CONFIG["vocab_size"], (ROWS, TOKENS), generator=generator)
        self.layers = self._kept(self._mean_of_layers)
        self.whole = self._kept(self._loss)

    def seconds(self) -> float:
        """The time of a forward and a backward pass."""
        started = time.perf_counter()
        self._loss().backward()
        return time.perf_counter() - started

    def gradients(self) -> list[torch.Tensor]:
        self.model.zero_grad()
        self._loss().backward()
        return [parameter.grad for parameter in self.model.parameters()]

    def _kept(self, forward: Callable[[], torch.Tensor]) -> SavedBytes:
        kept, _ = saved_bytes(self.model, forward)
        return kept

    def _mean_of_layers(self) -> torch.Tensor:
        hidden: torch.Tensor = self.model.model(input_ids=self.ids, use_cache=False).last_hidden_state
        return hidden.mean()

    def _loss(self) -> torch.Tensor:
        logits = self.model(input_ids=self.ids, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), self.ids.flatten())


def steps() -> tuple[dict[str, Variant], dict[str, float]]:
    """All variants, whose gradients are the same, and the median time of a step of each."""
    with a_setup() as setup:
        variants = {name: Variant(build(setup, CONFIG, **features)) for name, features in VARIANTS.items()}
        expected = variants["off"].gradients()
        for name, variant in variants.items():
            if not all(map(torch.equal, variant.gradients(), expected)):
                raise SystemExit(f"{name}: the gradients are others")
        rounds = [
            {name: variant.seconds() for name, variant in variants.items()} for _ in range(NUM_WARM_UP + NUM_ROUNDS)
        ]
    return variants, {name: median(one[name] for one in rounds[NUM_WARM_UP:]) for name in variants}


def growth_of_a_run(*overrides: str) -> dict[str, int]:
    """Run `hp-train` in a process of its own; how much its memory grows between steps 50 and 200."""
    watch = Path(__file__).with_name("memory_watch.py")
    with tempfile.TemporaryDirectory(prefix="hp-memory-") as name:
        folder = Path(name)
        recipe, run = folder / "recipe.yaml", folder / "run"
        recipe.write_text(RECIPE.replace("hand_written.py", watch.name))
        environment = {**os.environ, "HP_CACHE_DIR": str(folder / "cache")}
        command = [sys.executable, "-m", "hp_core", str(recipe), f"--output_dir={run}", *overrides]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        found = json.loads((run / RESULTS).read_text())
    first = found["steps"].index(50)
    return {
        "growth_bytes": found["resident_bytes"][-1] - found["resident_bytes"][first],
        "growth_python_blocks": found["python_blocks"][-1] - found["python_blocks"][first],
        "resident_bytes": found["resident_bytes"][-1],
        "steps": found["steps"][-1],
    }
