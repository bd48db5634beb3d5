"""The adapters of LoRA in a sharding plan: each matrix lies as the layer's weight does along the side that they share.

Of `y = W x + s B (A x)`, where the rows of W are cut, so are those of B, and every rank has all of A; where its columns
are cut, so are those of A, and what a rank computes is a summand of y as before. What a rank has whole and uses for its
own share of the work has a gradient that is a part of a sum. DoRA's lengths are one for each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from hp_core.model.adapters.inject import PARTS
from hp_core.model.adapters.layers import adapted_layers
from hp_core.parallel.plan.boundary import Boundary, ParameterPlan, ShardingPlan


def with_adapters(model: nn.Module, plan: ShardingPlan) -> ShardingPlan:
    """A plan of the plain model with the adapters that are around its layers, and with the names that they make."""
    layers = adapted_layers(model)
    if not layers:
        return plan
    return replace(plan, boundaries=tuple(_with_own(one, layers) for one in plan.boundaries))


def _with_own(boundary: Boundary, layers: dict[str, Any]) -> Boundary:
    dot = f"{boundary.fqn}." if boundary.fqn else ""
    found: list[ParameterPlan] = []
    for plan in boundary.parameters:
        owner, _, leaf = f"{dot}{plan.name}".rpartition(".")
        layer = layers.get(owner)
        if layer is None:
            found.append(plan)
            continue
        path = f"{owner}.".removeprefix(dot)
        found.append(replace(plan, name=f"{path}base_layer.{leaf}"))
        if leaf == "weight":
            found += _of_layer(layer, path, plan)
    return replace(boundary, parameters=tuple(found))


def _of_layer(layer: Any, path: str, base: ParameterPlan) -> Iterator[ParameterPlan]:
    is_used_in_part = base.partial or base.shard_dim is not None
    for part in PARTS:
        for name, parameter in layer.get_submodule(part).named_parameters():
            plan = ParameterPlan(f"{path}{part}.{name}", tuple(parameter.shape))
            if part in ("lora_A", "lora_embedding_A"):
                cut, num_slices = (1 if base.shard_dim == 1 else None), 1
            else:
                cut, num_slices = (0 if base.shard_dim == 0 else None), base.num_slices
            yield replace(plan, shard_dim=cut, partial=is_used_in_part and cut is None, num_slices=num_slices)
