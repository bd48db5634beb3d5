"""The forward of a shared module: its own code, on this rank's parts of its parameters.

The parts take the parameters' places while the module runs. So whatever code computes with them, a replacement's too,
works on plain local tensors, and nothing of it is dispatched through DTensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from operator import is_
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from hp_core.errors import RunError
from hp_core.parallel.plan.boundary import ParameterPlan
from hp_core.parallel.plan.edge import REPLICATE, Edge
from hp_core.parallel.tensor.place import in_place
from hp_core.parallel.tensor.random_numbers import own_random_numbers
from hp_core.parallel.tensor.sequence import Sequences

# What a rank computes of a module.
Work = Literal["share", "whole", "tokens"]
# Of a learnt input that the plan does not name each rank uses its own share, too.
_LEARNT = Edge("", REPLICATE, REPLICATE, 0, 0, is_shared=True)


@dataclass(frozen=True)
class Part:
    """What this rank computes with in place of a parameter: the module that holds it, its name there, its plan."""

    owner: nn.Module
    name: str
    plan: ParameterPlan
    tp_rank: int
    tp_size: int

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """The part, a plain tensor; its gradient reaches the parameter in the parameter's layout.

        FSDP sums a gradient that is partial over the tensor ranks before it shards it.
        """
        assert isinstance(parameter, DTensor)
        if self.plan.shard_dim is not None:
            return parameter.to_local()
        whole = parameter.to_local(grad_placements=[Partial()])
        if self.plan.num_slices == 1:
            return whole
        length = whole.shape[0] // self.plan.num_slices
        start = self.tp_rank * self.plan.num_slices // self.tp_size * length
        return whole[start : start + length]


@runtime_checkable
class DropsAttention(Protocol):
    """An attention of transformers, which drops its weights with this probability while it trains."""

    attention_dropout: float
    training: bool


class SharedForward:
    """Takes the place of a module's forward: its tensors cross the edges of the plan, and it computes on its parts.

    Args:
        module: what is called.
        parts: what it computes with in place of its parameters.
        inputs: the edges of its inputs.
        group: the tensor ranks.
        forward: its own forward, where that isn't what it is called by.
        output: that of its output, or None where a child's forward has it or there is none.
        sequence: of a model whose sequences are cut.
        work: whether each rank computes its own share, so that it drops by random numbers of its own; the whole, as all
            others do; or its part of the tokens, so that what else it learns through is not understood.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: Sequence[Part],
        inputs: Sequence[Edge],
        group: dist.ProcessGroup,
        *,
        forward: Callable[..., Any] | None = None,
        output: Edge | None = None,
        sequence: Sequences | None = None,
        work: Work = "share",
    ) -> None:
        self._module = module
        self._forward: Callable[..., Any] = forward or module.forward
        self._names = tuple(inspect.signature(self._forward).parameters)
        self._parts = tuple(parts)
        self._edges = {edge.name: edge for edge in inputs}
        self._group = group
        self._output = output
        self._sequence = sequence or Sequences(group)
        self._work = work

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward on this rank's parts."""
        values = [self._crossed(name, value) for name, value in zip_longest(self._names[: len(args)], args)]
        named = {name: self._crossed(name, value) for name, value in kwargs.items()}
        own = {(part.owner, part.name): part for part in self._parts}
        replaced = {place: part.local(_parameter(*place)) for place, part in own.items()}
        with in_place(replaced), self._random_numbers():
            found = self._forward(*values, **named)
        return found if self._output is None else self._sequence.first_crossed(found, self._output)

    def _random_numbers(self) -> AbstractContextManager[None]:
        module = self._module
        drops = isinstance(module, DropsAttention) and module.training and module.attention_dropout > 0
        return own_random_numbers(self._group.rank()) if drops and self._work == "share" else nullcontext()

    def _crossed(self, name: str | None, value: Any) -> Any:
        edge = self._edges.get(name or "")
        if not isinstance(value, torch.Tensor):
            if edge is not None and value is not None:
                found = f"{type(self._module).__name__} takes a {type(value).__name__} as {name!r}"
                raise RunError(f"plan_overrides: {found}, and only a tensor can be placed; remove {name!r}")
            return self._within(name, value)
        if edge is None and value.requires_grad and self._work != "whole":
            if self._work == "tokens":
                message = f"{type(self._module).__name__} learns through {name!r}, too; remove 'sequence_parallel'"
                raise RunError(f"accelerator.sequence_parallel: {message}")
            edge = _LEARNT
        return value if edge is None else self._sequence.crossed(value, edge)

    def _within(self, name: str | None, value: Any) -> Any:
        """The learnt tensors of a tuple or list, such as position embeddings, cross like those that come alone."""
        if not isinstance(value, (tuple, list)):
            return value
        crossed = [self._crossed(None, one) for one in value]
        return value if all(map(is_, crossed, value)) else type(value)(crossed)


class RowForward:
    """Takes the place of the forward of a region's last projection: its outputs are summands, its bias added once.

    `projection` is what is called: the layer itself, or what is around it.
    """

    def __init__(self, projection: nn.Module, linear: nn.Linear, output: Edge, sequence: Sequences) -> None:
        self._linear = linear
        self._forward: Callable[..., torch.Tensor] = projection.forward
        self._output = output
        self._sequence = sequence

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Project this rank's features and have the sum of all cross the edge of the plan."""
        bias = self._linear.bias
        if bias is None:
            return self._sequence.crossed(self._forward(input), self._output)
        with in_place({(self._linear, "bias"): None}):
            projected = self._forward(input)
        return self._sequence.crossed(projected, self._output) + bias


def _parameter(owner: nn.Module, name: str) -> torch.Tensor:
    parameter = owner._parameters[name]
    assert parameter is not None
    return parameter
