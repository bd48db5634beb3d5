"""Milliseconds to plan two mixtures at 512 and 1,024 ranks on the meta device in one process, and what a rank holds.

`plan_ms` is the median time of deriving every parameter's place on all axes and counting what the first and the last
rank hold; `ratio_1024_to_8` compares it for the larger model on 1,024 and on 8 ranks. `applied` says what the first
rank of 512 holds once the plan of the smaller model is applied under a fake process group, which must be the same.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from transformers import PreTrainedModel

from hp_core.config.models import AcceleratorConfig, FsdpConfig
from hp_core.parallel.fsdp import shard_model
from hp_core.parallel.plan.derive import derive_plan
from hp_core.parallel.plan.model_plan import plan_model
from hp_core.parallel.sizes import ParallelSizes
from hp_core.parallel.tensor.apply import apply_plan
from hp_core.parallel.tiny import fake_setup
from tests.benchmarks.qwen3_moe import qwen3_30b, qwen3_235b

NUM_RUNS = 5
GOAL_MS = 3000
ON_512 = ParallelSizes(dp_replicate=2, dp_shard=32, cp=2, tp=4)
ON_1024 = ParallelSizes(dp_replicate=2, dp_shard=64, cp=2, tp=4)
ON_8 = ParallelSizes(dp_shard=1, cp=2, tp=4)
EXPERTS_ON_512 = ParallelSizes(dp_replicate=2, dp_shard=128, cp=2, ep=16)
EXPERTS_ON_1024 = ParallelSizes(dp_replicate=2, dp_shard=256, cp=2, ep=16)


def measure() -> dict[str, Any]:
    large, small = qwen3_235b(), qwen3_30b()
    few, many = (_milliseconds(large, sizes) for sizes in (ON_8, ON_1024))
    return {
        "qwen3_30b_a3b": {"tp": _planned(small, ON_512), "ep": _planned(small, EXPERTS_ON_512)},
        "qwen3_235b_a22b": {"tp": _planned(large, ON_1024), "ep": _planned(large, EXPERTS_ON_1024)},
        "ratio_1024_to_8": round(many / few, 2),
        "applied": _applied(),
        "goal_ms": GOAL_MS,
    }


def _planned(model: PreTrainedModel, sizes: ParallelSizes) -> dict[str, Any]:
    plan = plan_model(model, sizes)
    return {
        "ranks": sizes.world,
        "sizes": {axis: size for axis, size in sizes.all.items() if size > 1},
        "plan_ms": round(_milliseconds(model, sizes), 1),
        "parameters": plan.total_parameters,
        "local_parameters_first_rank": plan.local_parameters(0),
        "local_parameters_last_rank": plan.local_parameters(sizes.world - 1),
    }


def _milliseconds(model: PreTrainedModel, sizes: ParallelSizes) -> float:
    times = []
    for _ in range(NUM_RUNS):
        started = time.perf_counter()
        plan = plan_model(model, sizes)
        plan.local_parameters(0)
        plan.local_parameters(sizes.world - 1)
        times.append(1e3 * (time.perf_counter() - started))
    return median(times)


def _applied() -> dict[str, Any]:
    accelerator, fsdp = AcceleratorConfig(tp_size=4, cp_size=2), FsdpConfig(dp_replicate_size=2)
    with fake_setup(ON_512.world, accelerator=accelerator, fsdp=fsdp) as setup:
        model = qwen3_30b()
        planned = plan_model(model, setup.sizes).local_parameters(0)
        started = time.perf_counter()
        apply_plan(model, derive_plan(model, setup.sizes.tp), setup.mesh["tp"])
        shard_model(model, setup)
        seconds = time.perf_counter() - started
        held = sum(parameter._local_tensor.numel() for parameter in model.parameters())  # type: ignore[attr-defined]
    return {"ranks": ON_512.world, "planned": planned, "held": held, "apply_ms": round(1e3 * seconds, 1)}
