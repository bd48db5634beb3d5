"""The forward of a module of experts whose ranks hold some each: tokens go to their experts, results come back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from hp_core.parallel.expert.exchange import exchange, in_order_of_tokens, routes_of, rows_of_pairs
from hp_core.parallel.expert.share import TokenShare

ExpertsForward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@runtime_checkable
class HoldsExperts(Protocol):
    """A module of transformers that holds all experts of a layer, or its router."""

    num_experts: int


def num_experts_of(module: object) -> int | None:
    """How many experts a module says that it has; None if it doesn't."""
    return module.num_experts if isinstance(module, HoldsExperts) else None


@dataclass(frozen=True, eq=False)
class Dispatch:
    """Takes the place of the forward of `experts`, whose own `forward` it calls with the rank's own experts.

    Nothing is dropped and no rank is left out: also a rank whose experts get no token, or one without tokens, takes
    part in every exchange, forward and backward.

    Args:
        experts: the module; its parameters are DTensors over the group while it runs.
        forward: what it computes, `(tokens, top_k_index, top_k_weights)` to tokens.
        group: the ranks that hold the experts.
        tensor_group: the ranks that are called with the same tokens, each of which sends its part of them; None where
            no other rank is.
    """

    experts: nn.Module
    forward: ExpertsForward
    group: dist.ProcessGroup
    tensor_group: dist.ProcessGroup | None = None

    @torch.compiler.disable(reason="only tokens tell how many are sent where")  # type: ignore[untyped-decorator]
    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """(tokens, size), the numbers of their chosen experts among all, and their weights, to (tokens, size).

        The weights stay here: a result is weighed where its token is.
        """
        if self.tensor_group is None:
            return self._computed(hidden_states, top_k_index, top_k_weights)
        share = TokenShare(len(hidden_states), self.tensor_group)
        inputs = (hidden_states, top_k_index, top_k_weights)
        return share.whole(self._computed(*(share.of(one) for one in inputs)))

    def _computed(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(self.experts, HoldsExperts)
        routes = routes_of(top_k_index, self.experts.num_experts, self.group)
        rows = rows_of_pairs(hidden_states, routes, top_k_index.shape[1])
        rows = exchange(rows, routes.send, routes.receive, self.group)
        rows = self._results(rows, routes.experts, top_k_weights.dtype)
        rows = exchange(rows, routes.receive, routes.send, self.group)
        rows = in_order_of_tokens(rows, routes).view(*top_k_index.shape, rows.shape[-1])
        return (rows * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)

    def _results(self, rows: torch.Tensor, experts: torch.Tensor, weights_dtype: torch.dtype) -> torch.Tensor:
        """What the rank's own experts make of the rows that came, (rows, size), each for one of them."""
        num_rows = len(rows)
        if num_rows == 0:
            # Experts without a row would have no gradient, and the ranks they are shared with would wait for it.
            rows, experts = F.pad(rows, (0, 0, 0, 1)), experts.new_zeros(1)
        with self._own_experts():
            weights = torch.ones(len(rows), 1, dtype=weights_dtype, device=rows.device)
            return self.forward(rows, experts.unsqueeze(-1), weights)[:num_rows]

    @contextmanager
    def _own_experts(self) -> Iterator[None]:
        """Let the module have the rank's own experts and no others."""
        module = self.experts
        assert isinstance(module, HoldsExperts)
        held, number = dict(module._parameters), module.num_experts
        module._parameters.update({name: _own(parameter) for name, parameter in held.items()})
        module.num_experts = number // self.group.size()
        try:
            yield
        finally:
            module._parameters.update(held)
            module.num_experts = number


class LocalCompute:
    """A function of the user's in the place of a module's forward; it has the signature of that function."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        self._compute = compute
        self.__signature__ = inspect.signature(compute)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute with the parameters that the module has now."""
        return self._compute(*args, **kwargs)


class OwnDispatch(Dispatch):
    """A dispatch whose `forward` sends the tokens itself: it is given the rank's own experts and all its tokens.

    Of tokens that tensor ranks share, those are its part.
    """

    def _computed(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        with self._own_experts():
            return self.forward(hidden_states, top_k_index, top_k_weights)


def dispatch_of(
    experts: nn.Module,
    forward: ExpertsForward,
    group: dist.ProcessGroup,
    tensor_group: dist.ProcessGroup | None = None,
) -> Dispatch:
    """What takes the place of the forward of a module whose experts lie on the ranks of `group`; see `Dispatch`."""
    kind = OwnDispatch if isinstance(forward, LocalCompute) else Dispatch
    return kind(experts, forward, group, tensor_group)


def _own(parameter: nn.Parameter | None) -> nn.Parameter | None:
    # A tensor that is no parameter, so that its gradient reaches the one that is.
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
