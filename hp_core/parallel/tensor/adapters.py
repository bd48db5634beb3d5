"""The adapters of a shared module: what they drop, and DoRA's lengths of rows of which each rank has a part."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hp_core.model.adapters.layers import adapted_layers
from hp_core.parallel.plan.boundary import Boundary
from hp_core.parallel.tensor.random_numbers import CommonDropout, OwnDropout


def share_adapters(region: nn.Module, boundary: Boundary, group: dist.ProcessGroup, *, draws_apart: bool) -> None:
    """Have the adapters in a module work on this rank's parts of their matrices.

    Args:
        region: the module.
        boundary: its plan.
        group: the tensor ranks.
        draws_apart: whether ranks draw other random numbers within the module.
    """
    dims = {plan.name: plan.shard_dim for plan in boundary.parameters}
    for fqn, layer in adapted_layers(region).items():
        has_part_of_inputs = dims.get(f"{fqn}.base_layer.weight".lstrip(".")) == 1
        for dropout in layer.lora_dropout.values():
            if not isinstance(dropout, nn.Dropout):
                continue
            if has_part_of_inputs:
                dropout.forward = OwnDropout(dropout, group.rank())  # type: ignore[method-assign]  # an instance's own forward
            elif draws_apart:
                dropout.forward = CommonDropout(dropout, group.rank(), fqn)  # type: ignore[method-assign]  # as above
        if has_part_of_inputs:
            for magnitude in layer.lora_magnitude_vector.values():
                magnitude.get_weight_norm = _Lengths(group)


class _Lengths:
    """Takes the place of what gives DoRA the norms of a weight's rows, where each rank has some of the columns."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @torch.no_grad()
    def __call__(self, weight: torch.Tensor, lora_weight: torch.Tensor, scaling: float, **_: Any) -> torch.Tensor:
        """The norms, (out,), of the whole rows of `weight + scaling * lora_weight`, of which both are (out, own in)."""
        squares = (weight + scaling * lora_weight).square().sum(dim=1)
        dist.all_reduce(squares, group=self._group)
        return squares.sqrt()
