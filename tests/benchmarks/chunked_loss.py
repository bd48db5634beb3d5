"""Time and extra peak memory of the chunked loss over the dense one: 4096 tokens, 256 features, 152,000 classes, fp32.

Every measurement is a process of its own, dense and chunked in turn; the figures are medians. Time and memory are those
of one forward and backward pass through the head and the loss; `_half_ignored` is for labels of which half are no
targets. Ratios of time are of the wall clock, so the machine must be idle; `cpu_` is the time of all threads.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

TOKENS, FEATURES, CLASSES, CHUNK_SIZE = 4096, 256, 152_000, 512
NUM_RUNS = 3
CASES = ("dense", "chunked", "dense_half_ignored", "chunked_half_ignored")
GOALS = {"time_ratio": 0.5, "memory_ratio": 0.12, "time_ratio_half_ignored": 0.3}


def measure() -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for _ in range(NUM_RUNS):
        for case in CASES:
            found[case].append(_in_a_process(case))
    figures = {
        f"{case}_{name}": round(median(run[name] for run in runs), 3)
        for case, runs in found.items()
        for name in ("seconds", "cpu_seconds", "extra_mib", "loss")
    }
    return {
        "chunk_size": CHUNK_SIZE,
        **figures,
        "time_ratio": round(figures["chunked_seconds"] / figures["dense_seconds"], 3),
        "memory_ratio": round(figures["chunked_extra_mib"] / figures["dense_extra_mib"], 3),
        "time_ratio_half_ignored": round(
            figures["chunked_half_ignored_seconds"] / figures["dense_half_ignored_seconds"], 3
        ),
        **{f"goal_{name}": goal for name, goal in GOALS.items()},
    }


def _in_a_process(case: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.chunked_loss", case],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


class HeadAlone(nn.Module):
    """A head above hidden states that are parameters, so that nothing else takes time or memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Parameter(torch.randn(1, TOKENS, FEATURES))
        self.head = nn.Linear(FEATURES, CLASSES, bias=False)

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.hidden[:, : input_ids.shape[1]]))


def run(case: str) -> dict[str, float]:
    """One forward and backward pass in this process."""
    from hp_plugins.losses.causal_lm import CausalLMLoss
    from hp_plugins.losses.chunked_causal_lm import ChunkedCausalLMLoss

    model = HeadAlone()
    is_chunked = case.startswith("chunked")
    loss_fn = ChunkedCausalLMLoss(chunk_size=CHUNK_SIZE) if is_chunked else CausalLMLoss()
    loss_fn.bind_model(model, None)
    ids = torch.randint(0, CLASSES, (1, TOKENS))
    labels = ids.roll(-1, 1)
    if case.endswith("half_ignored"):
        labels[:, ::2] = -100
    before = _resident_mib()
    started, cpu_started = time.perf_counter(), time.process_time()
    outputs = model(**loss_fn.prepare_model_inputs({"input_ids": ids}, {"labels": labels}))
    loss = loss_fn(model_output=outputs, labels=labels) / TOKENS
    loss.backward()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    # In KiB on Linux; importing and building took less than the pass.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "extra_mib": peak - before, "loss": loss.item()}


def _resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))
