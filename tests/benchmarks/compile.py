"""Time of steps of compiled layers relative to layers as they are written, and what compiling takes at first and again.

A tiny Qwen3 (4 layers of 128 features, a vocabulary of 4096, 4 rows of 256 tokens) on one process of the CPU. Steps
alternate, and a second process finds the code that the first has left in the cache.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hp_core.config.compile import CompileConfig
from hp_core.model.compile import start_compiling
from hp_core.training.compiling import Compilations
from tests.model.tiny import QWEN3, a_setup, build

CONFIG = {
    **QWEN3,
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 384,
    "head_dim": 32,
    "vocab_size": 4096,
    "max_position_embeddings": 256,
}
BATCH_SIZE, LENGTH = 4, 256
NUM_STEPS = 15


def measure() -> dict[str, Any]:
    """Two processes after each other with one cache, empty at first."""
    with TemporaryDirectory() as cache:
        cold, warm = (_in_a_process(cache) for _ in range(2))
    return {
        "layers": CONFIG["num_hidden_layers"],
        "graphs": warm["graphs"],
        "written_step_ms": round(1e3 * warm["written"], 1),
        "compiled_step_ms": round(1e3 * warm["compiled"], 1),
        "time_ratio_compiled_to_written": round(warm["compiled"] / warm["written"], 3),
        "time_ratio_compiled_to_written_cold": round(cold["compiled"] / cold["written"], 3),
        "first_step_cold_s": round(cold["first"], 2),
        "first_step_warm_s": round(warm["first"], 2),
        "time_ratio_first_step_warm_to_cold": round(warm["first"] / cold["first"], 3),
        "parts_from_cache": [cold["from_cache"], warm["from_cache"]],
        "parts_not_in_cache": [cold["not_in_cache"], warm["not_in_cache"]],
        "loss_difference": warm["loss_difference"],
    }


def _in_a_process(cache: str) -> Mapping[str, Any]:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_measured, cache).result()


def _measured(cache: str) -> dict[str, Any]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    with a_setup() as setup:
        written = build(setup, CONFIG)
        compiled = build(setup, CONFIG, compile_config=CompileConfig(mode="default"))
    compiler = start_compiling(compiled)
    assert compiler is not None
    compilations = Compilations(compiler)
    _step(written)
    started = time.perf_counter()
    loss = _step(compiled)
    first = time.perf_counter() - started
    seconds: dict[str, list[float]] = {"written": [], "compiled": []}
    for _ in range(NUM_STEPS):
        for name, model in (("written", written), ("compiled", compiled)):
            started = time.perf_counter()
            _step(model)
            seconds[name].append(time.perf_counter() - started)
    compilations.read()
    medians = {name: median(values) for name, values in seconds.items()}
    return {**compilations.facts(), **medians, "first": first, "loss_difference": abs(loss - _step(written))}


def _step(model: Any) -> float:
    ids = torch.arange(BATCH_SIZE * LENGTH).reshape(BATCH_SIZE, LENGTH) * 7 % CONFIG["vocab_size"]
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    model.zero_grad()
    return float(loss.detach())
