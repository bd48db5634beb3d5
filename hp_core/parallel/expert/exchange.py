"""Rows that travel to the ranks of their experts and back, with their gradients the other way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, eq=False)
class Routes:
    """Where the pairs of token and expert of a rank go, and what it gets from the others.

    Args:
        order: (pairs,) the pairs sorted by expert, and so by the rank that holds it.
        back: (pairs,) the inverse of `order`.
        send: how many rows go to each rank.
        receive: how many come from each.
        experts: (rows that come,) which of the rank's own experts each of them is for.
    """

    order: torch.Tensor
    back: torch.Tensor
    send: list[int]
    receive: list[int]
    experts: torch.Tensor


@torch.no_grad()
def routes_of(experts: torch.Tensor, num_experts: int, group: dist.ProcessGroup) -> Routes:
    """Agree with the other ranks of `group` on what goes where. All of them call it.

    Args:
        experts: (tokens, chosen) the number of each chosen expert among all `num_experts`.
        num_experts: those of all ranks; rank r holds the r-th part of them.
        group: the ranks that hold the experts.
    """
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    outgoing = torch.bincount(flat, minlength=num_experts)
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    num_own = num_experts // group.size()
    # The sizes must be known on the host; both in one copy.
    send, receive = torch.stack([outgoing, incoming]).view(2, group.size(), num_own).sum(-1).tolist()
    own = torch.arange(num_own, device=flat.device).repeat(group.size())
    return Routes(order, back, send, receive, own.repeat_interleave(incoming, output_size=sum(receive)))


def rows_of_pairs(tokens: torch.Tensor, routes: Routes, chosen: int) -> torch.Tensor:
    """A row for each pair, sorted by expert, from (tokens, size)."""
    rows: torch.Tensor = _Rows.apply(tokens, routes.order, routes.back, chosen)  # type: ignore[no-untyped-call]
    return rows


def in_order_of_tokens(rows: torch.Tensor, routes: Routes) -> torch.Tensor:
    """The rows of the pairs, sorted by expert, in the order of the tokens again."""
    sorted_back: torch.Tensor = _Permute.apply(rows, routes.back, routes.order)  # type: ignore[no-untyped-call]
    return sorted_back


def exchange(rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Send the first `send[0]` rows to rank 0 of the group, and so on; get `receive[r]` from rank r. All call it."""
    exchanged: torch.Tensor = _Exchange.apply(rows, send, receive, group)  # type: ignore[no-untyped-call]
    return exchanged


class _Rows(torch.autograd.Function):
    """Copies of the tokens' rows. Their gradients are summed by token without atomics, so always in one order."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, order: torch.Tensor, back: torch.Tensor, chosen: int) -> torch.Tensor:
        ctx.save_for_backward(back)
        ctx.chosen = chosen
        return tokens[order // chosen]

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        rows = outer[0][back]
        return rows.view(len(rows) // ctx.chosen, ctx.chosen, rows.shape[1]).sum(1), None, None, None


class _Permute(torch.autograd.Function):
    """Rows in another order."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return outer[0][inverse], None, None


class _Exchange(torch.autograd.Function):
    """Rows to other ranks; their gradients come back the way the rows went."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.way = send, receive, group
        return _exchanged(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        send, receive, group = ctx.way
        return _exchanged(outer[0], receive, send, group), None, None, None


def _exchanged(rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    came = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(came, rows.contiguous(), receive, send, group=group)
    return came
