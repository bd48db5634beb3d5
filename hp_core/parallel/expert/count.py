"""The number of experts that a recipe's model has, as far as its configuration is at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_core.errors import Problem

# How configurations of transformers call it.
NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def expert_problems(values: Mapping[str, Any], ep_size: int, *, is_complete: bool) -> list[Problem]:
    """What is wrong with `ep_size` ranks for the experts of a model of this configuration, as far as it is known.

    With a complete configuration that names no experts there are none.
    """
    num_experts = _number(values)
    if num_experts is None:
        message, hint = f"a {values.get('model_type')} has no experts to spread", "remove 'ep_size'"
        none = [Problem(message, path="accelerator.ep_size", hint=hint)]
        return none if is_complete and ep_size > 1 else []
    problem = indivisible(num_experts, ep_size)
    return [] if problem is None else [problem]


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
        for key in NUM_EXPERTS_KEYS:
            if isinstance(one.get(key), int):
                return int(one[key])
    return None
