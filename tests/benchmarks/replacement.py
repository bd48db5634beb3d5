"""Milliseconds to plan the replacements of a 235-billion-parameter mixture (94 layers, 5 rules) on the meta device.

The skeleton is made anew for each plan; `plan_ms` is the time of matching, building, checking and installing alone,
`first_plan_ms` that of the process's first plan, which also tries out each kind of module once.
"""

from __future__ import annotations

import gc
import time
from statistics import median
from typing import Any

from hp_core.components import Components
from hp_core.config.plan_override import PlanOverride
from hp_core.config.target import Target
from hp_core.model.replacement.replacer import ModuleReplacer
from tests.benchmarks.qwen3_moe import qwen3_235b
from tests.model.replacement.rules import call_factory
from tests.model.tiny import a_setup

NUM_RUNS = 7
GOAL_MS = 100
RULES = (
    ("*.input_layernorm", "rms_norm"),
    ("*.post_attention_layernorm", "rms_norm"),
    ("model.norm", "rms_norm"),
    ("*.self_attn", "sdpa_attention"),
    ("*.experts", "grouped_experts"),
)


def measure() -> dict[str, Any]:
    components = Components.discover()
    rules = [_rule(components, index, match, name) for index, (match, name) in enumerate(RULES)]
    skeletons, plans = [], []
    with a_setup() as setup:
        for _ in range(NUM_RUNS):
            gc.collect()
            started = time.perf_counter()
            model = qwen3_235b()
            made = time.perf_counter()
            replaced = ModuleReplacer(rules, call_factory).apply(model, setup)
            plans.append(1e3 * (time.perf_counter() - made))
            skeletons.append(1e3 * (made - started))
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "modules": sum(1 for _ in model.modules()),
        "rules": len(rules),
        "replaced": sum(len(one.fqns) for one in replaced),
        "skeleton_ms": round(median(skeletons), 1),
        "first_plan_ms": round(plans[0], 1),
        "plan_ms": round(median(plans), 1),
        "plan_best_ms": round(min(plans), 1),
        "goal_ms": GOAL_MS,
        "time_ratio_plan_to_skeleton": round(median(plans) / median(skeletons), 3),
    }


def _rule(components: Components, index: int, match: str, name: str) -> PlanOverride:
    group = "hp.module_replacements"
    component = components.find(group, name)
    target = Target(f"plan_overrides[{index}].replace_module", group, name=name, component=component)
    return PlanOverride(match=(match,), replace_module=target)
