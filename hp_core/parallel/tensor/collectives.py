"""Conversions between the placements of a tensor on a group of ranks, with those of its gradient."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hp_core.parallel.plan.edge import Edge, Placement, conversion

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:  # their names before torch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single


def cross(tensor: torch.Tensor, edge: Edge, group: dist.ProcessGroup, length: int | None = None) -> torch.Tensor:
    """`tensor` on the other side of `edge`; its gradient comes back as the edge says. Every rank of `group` calls it.

    A dimension that doesn't divide is cut into parts of one size, the last ones filled up with zeros.

    Args:
        tensor: as it lies at `edge.src`; of a dimension that doesn't divide the last part may be shorter.
        edge: what changes.
        group: the ranks that hold the tensor.
        length: what the cut dimension is gathered to; None where all parts are full.
    """
    if edge.src == edge.dst and not edge.is_shared:
        return tensor
    crossed: torch.Tensor = _Crossed.apply(tensor, edge, group, length)  # type: ignore[no-untyped-call]
    return crossed


class _Crossed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, edge: Edge, group: dist.ProcessGroup, length: int | None
    ) -> torch.Tensor:
        ctx.edge, ctx.group = edge, group
        ctx.shape = tensor.shape
        return converted(tensor, edge.src, edge.dst, group, length)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        src, dst = ctx.edge.gradient
        length = None if src.dim is None else ctx.shape[src.dim]
        gradient = converted(outer[0], src, dst, ctx.group, length)
        if dst.dim is not None:
            # The last rank's part may have been shorter than it was cut now.
            gradient = gradient.narrow(dst.dim, 0, ctx.shape[dst.dim])
        return gradient, None, None, None


def converted(
    tensor: torch.Tensor, src: Placement, dst: Placement, group: dist.ProcessGroup, length: int | None = None
) -> torch.Tensor:
    """`tensor`, which lies as `src`, as `dst`; without a gradient. See `cross`.

    Raises:
        ValueError: nothing makes one of the other.
    """
    kind = conversion(src, dst)
    if kind is None:
        return tensor.view_as(tensor)
    if kind == "all_reduce":
        # A gradient may be a view that others read, too.
        summed = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        return summed
    if src.dim is not None and dst.dim is not None:
        return _exchanged(tensor, src.dim, dst.dim, group, length)
    if src.dim is not None:
        return _gathered(tensor, src.dim, group, length)
    assert dst.dim is not None
    parts = _filled_up(tensor, dst.dim, group.size())
    own = parts.new_empty((len(parts) // group.size(), *parts.shape[1:]))
    if kind == "slice":
        own.copy_(parts.narrow(0, group.rank() * len(own), len(own)))
    else:
        reduce_scatter_single(own, parts.contiguous(), group=group)
    return own.movedim(0, dst.dim).contiguous()


def _filled_up(tensor: torch.Tensor, dim: int, num_parts: int) -> torch.Tensor:
    """`dim` first, and a multiple of `num_parts`."""
    first = tensor.movedim(dim, 0)
    missing = -len(first) % num_parts
    return F.pad(first, (*(0, 0) * (first.ndim - 1), 0, missing)) if missing else first


def _gathered(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup, length: int | None) -> torch.Tensor:
    dim %= tensor.ndim
    if prod(tensor.shape[:dim]) == 1 and length in (None, tensor.shape[dim] * group.size()):
        # The parts follow one another in memory.
        shape = list(tensor.shape)
        shape[dim] *= group.size()
        whole = tensor.new_empty(shape)
        all_gather_single(whole.view(-1), tensor.reshape(-1), group=group)
        return whole
    own = tensor.movedim(dim, 0)
    if length is not None:
        own = _filled_up(own, 0, -(-length // group.size()))
    own = own.contiguous()
    parts = own.new_empty((group.size() * len(own), *own.shape[1:]))
    all_gather_single(parts, own, group=group)
    # No view: FSDP2 hooks what its modules return.
    return parts[:length].movedim(0, dim).clone(memory_format=torch.contiguous_format)


def _exchanged(tensor: torch.Tensor, src: int, dst: int, group: dist.ProcessGroup, length: int | None) -> torch.Tensor:
    parts = _filled_up(tensor, dst, group.size()).contiguous()
    came = torch.empty_like(parts)
    dist.all_to_all_single(came, parts, group=group)
    by_rank = [part.movedim(0, dst) for part in came.chunk(group.size())]
    whole = torch.cat(by_rank, dim=src)
    return whole if length is None else whole.narrow(src, 0, length)
