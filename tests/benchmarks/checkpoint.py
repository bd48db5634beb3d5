"""The time that training stands still for a checkpoint, beside torch's own, and the bytes that a load reads.

Two ranks that share a model of 30 million parameters with AdamW save it again and again: by torch's distributed
checkpoint alone, as a run does, and as a run does in the background. The three take turns, and medians are compared.
All have their files on the disk when they are done (fsync); before each, the disk is idle. The stall in the background
is the time of the call; how much longer the steps take that follow until the files are there is measured as well.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from hp_core.checkpoint.layout import CHECKPOINTS
from hp_core.checkpoint.saver import Contents, Saver
from hp_core.checkpoint.store import optimizer_names
from hp_core.checkpoint.tensors import model_tensors, optimizer_tensors
from hp_core.config.checkpoint import CheckpointConfig
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.setup import DistributedSetup
from hp_core.testing.ranks import run_ranks
from tests.benchmarks.bytes_read import bytes_read
from tests.model.tiny import a_setup, build

NUM_RANKS = 2
NUM_REPETITIONS = 24
# Allocators, thread pools and the buffers of copies settle; not timed.
NUM_WARM_UP = 2
ROWS, TOKENS = 2, 128
# Before each save, so that all find memory and caches as training leaves them.
STEPS_BEFORE = 3
CONFIG = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
GOALS = {"async_stall_ratio": 0.25, "sync_over_dcp_ratio": 1.1}
# Each byte of the files once over all ranks.
READ_WITHIN = 0.05


def measure() -> dict[str, Any]:
    """Save and load; see the module."""
    with tempfile.TemporaryDirectory(prefix="hp-checkpoint-") as folder:
        by_rank = run_ranks(_saves, NUM_RANKS, folder, timeout=900)
    sizes = by_rank[0].pop("sizes")
    times = {
        name: median(max(values) for values in zip(*(rank[name] for rank in by_rank), strict=True))
        for name in by_rank[0]
    }
    ratios = {
        "async_stall_ratio": round(times["async_stall"] / times["sync"], 4),
        "sync_over_dcp_ratio": round(times["sync"] / times["dcp"], 4),
    }
    read = bytes_read()
    reached = all(ratios[name] <= goal for name, goal in GOALS.items())
    return {
        **ratios,
        # Of the time of a save, what the steps beside it lose.
        "async_slowdown_ratio": round(times["async_slowdown"] / times["sync"], 4),
        **read,
        "goals": {**GOALS, "bytes_read_ratio": [1 - READ_WITHIN, 1 + READ_WITHIN]},
        "reached": reached and abs(read["bytes_read_ratio"] - 1) <= READ_WITHIN,
        "seconds": {name: round(value, 4) for name, value in times.items()},
        "repetitions": NUM_REPETITIONS,
        **sizes,
    }


def _saves(environment: ProcessEnvironment, folder: str) -> dict[str, Any]:
    """This rank's seconds for each way to save, in the order of the repetitions."""
    with a_setup(environment) as setup:
        trial = _Trial(setup, Path(folder))
        ways: dict[str, Callable[[], dict[str, float]]] = {
            "dcp": trial.by_torch,
            "sync": trial.as_a_run,
            "async": trial.in_the_background,
        }
        found: dict[str, Any] = {}
        # Each as often after each other one: what one leaves in memory and caches is another's to pay for.
        orders = itertools.cycle(itertools.permutations(ways))
        for _ in range(NUM_WARM_UP + NUM_REPETITIONS):
            for name in next(orders):
                for what, seconds in ways[name]().items():
                    found.setdefault(what, []).append(seconds)
        return {**{what: values[NUM_WARM_UP:] for what, values in found.items()}, "sizes": trial.sizes()}


class _Trial:
    """A model, an optimizer with moments, and ways to save them."""

    def __init__(self, setup: DistributedSetup, folder: Path) -> None:
        self.setup, self.folder = setup, folder
        self.model = build(setup, CONFIG)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.ids = torch.randint(0, CONFIG["vocab_size"], (ROWS, TOKENS))
        self.savers = {
            is_async: Saver(folder, CheckpointConfig.model_validate({"async": is_async}), setup)
            for is_async in (False, True)
        }
        self.number = 0
        self.step()

    def step(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def by_torch(self) -> dict[str, float]:
        self._prepare()
        started = time.perf_counter()
        state = {**model_tensors(self.model), **optimizer_tensors(self.model, [self.optimizer])}
        dcp.save(state, checkpoint_id=self.folder / "plain")
        return {"dcp": time.perf_counter() - started}

    def as_a_run(self) -> dict[str, float]:
        self._prepare()
        started = time.perf_counter()
        self.savers[False].start(self._contents())
        return {"sync": time.perf_counter() - started}

    def in_the_background(self) -> dict[str, float]:
        quiet = self._prepare()
        saver = self.savers[True]
        started = time.perf_counter()
        is_written = bool(saver.start(self._contents()))
        stall = time.perf_counter() - started
        steps, seconds = 0, 0.0
        while not self._all(is_written or saver.is_done):
            assert not saver.has_failed
            seconds += self._seconds_of_steps(1)
            steps += 1
        saver.finish()
        return {"async_stall": stall, "async_slowdown": max(0.0, seconds - steps * quiet)}

    def sizes(self) -> dict[str, int]:
        number = sum(parameter.numel() for parameter in self.model.parameters())
        return {"parameters": number, "bytes_saved": 12 * number, "num_ranks": NUM_RANKS}

    def _prepare(self) -> float:
        """An idle disk without the files of the save before, and the seconds of a step while nothing is saved."""
        self.number += 1
        self.setup.barrier()
        if self.setup.environment.is_main:
            shutil.rmtree(self.folder / CHECKPOINTS, ignore_errors=True)
            shutil.rmtree(self.folder / "plain", ignore_errors=True)
            os.sync()
        self.setup.barrier()
        quiet = self._seconds_of_steps(STEPS_BEFORE) / STEPS_BEFORE
        self.setup.barrier()
        return quiet

    def _seconds_of_steps(self, number: int) -> float:
        started = time.perf_counter()
        for _ in range(number):
            self.step()
        return time.perf_counter() - started

    def _all(self, is_done: bool) -> bool:
        done = torch.tensor(int(is_done))
        dist.all_reduce(done, dist.ReduceOp.MIN, group=self.setup.host_group)
        return bool(done)

    def _contents(self) -> Contents:
        return Contents(
            step=self.number,
            model=self.model,
            loss_fn=torch.nn.Module(),
            optimizers=[self.optimizer],
            trainer_state={"optimizers": optimizer_names([self.optimizer]), "world_size": NUM_RANKS},
            manifest={},
            plugin_state={},
        )
