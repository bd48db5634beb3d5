"""The two ends of a region that tensor ranks share: each is an all-reduce in one pass and nothing in the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def copy_to_ranks(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`tensor` itself, whose gradient is summed over the ranks: each computes with it for its own share."""
    copied: torch.Tensor = _CopyToRanks.apply(tensor, group)  # type: ignore[no-untyped-call]
    return copied


def sum_over_ranks(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of all ranks' `tensor`s, whose gradient each of them gets."""
    summed: torch.Tensor = _SumOverRanks.apply(tensor, group)  # type: ignore[no-untyped-call]
    return summed


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None]:
        # A gradient may be a view that others read, too.
        gradient = outer[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        summed = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None]:
        return outer[0], None
