"""Whether an entry of `plan_overrides` is for a run of these sizes."""

from __future__ import annotations

from collections.abc import Mapping

from hp_core.config.plan_override import PlanOverride


def is_active(override: PlanOverride, sizes: Mapping[str, int]) -> bool:
    """Without `when` always, else where that size is above 1."""
    if override.when is None:
        return True
    size = sizes["dp_replicate"] * sizes["dp_shard"] if override.when == "dp" else sizes[override.when]
    return size > 1
