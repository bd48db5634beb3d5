"""The number of experts that a recipe's model has, as far as its configuration is at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_core.config.target import Target
from hp_core.errors import Problem
from hp_core.parallel.known import known_config

# How configurations of transformers call it.
_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def known_num_experts(model: Target) -> int | None:
    """What the recipe or the model's own directory says; None where neither does. The hub is not asked."""
    return _number(known_config(model))


def indivisible(num_experts: int, ep_size: int) -> Problem | None:
    """What is wrong with so many experts on so many ranks, if anything is."""
    if num_experts % ep_size == 0:
        return None
    works = ", ".join(str(size) for size in range(1, num_experts + 1) if num_experts % size == 0)
    message = f"{num_experts} experts can't be divided among {ep_size} ranks"
    return Problem(message, path="accelerator.ep_size", hint=f"ep_size that would: {works}")


def _number(values: Mapping[str, Any]) -> int | None:
    text = values.get("text_config")
    for one in (values, text if isinstance(text, Mapping) else {}):
        for key in _KEYS:
            if isinstance(one.get(key), int):
                return int(one[key])
    return None
