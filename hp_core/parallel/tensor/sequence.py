"""Sequences whose tokens tensor ranks share between the regions of a model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hp_core.errors import RunError
from hp_core.parallel.plan.boundary import Boundary
from hp_core.parallel.plan.edge import Edge, Placement
from hp_core.parallel.tensor.collectives import cross

_DIM = 1


class Sequences:
    """The whole length of the sequences on their way through a model, which is seen where they are cut.

    A layer that is recomputed in the backward pass belongs to the sequences that came last.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._length: int | None = None

    def crossed(self, tensor: torch.Tensor, edge: Edge) -> torch.Tensor:
        """Have a tensor of shape (rows, tokens, ...) cross an edge; what fills up the last part comes and goes here.

        Raises:
            RunError: it has not the length of a part where it should be one.
        """
        if _cuts(edge.src, tensor):
            self._require_part(tensor, edge)
            return cross(tensor, edge, self._group, self._length)
        if _cuts(edge.dst, tensor):
            self._length = tensor.shape[_DIM]
        return cross(tensor, edge, self._group)

    def first_crossed(self, found: Any, edge: Edge) -> Any:
        """Have a module's output cross an edge: a tensor, or the first of a tuple."""
        if isinstance(found, tuple):
            return (self.crossed(found[0], edge), *found[1:])
        return self.crossed(found, edge)

    def enter(self, layer: nn.Module, boundary: Boundary) -> None:
        """Cut the sequences before `layer` is called; not in its forward, so that what is kept of it is a part."""
        names = tuple(inspect.signature(layer.forward).parameters)
        (edge,) = boundary.inputs

        def cut(
            module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            del module
            if edge.name in kwargs:
                return args, {**kwargs, edge.name: self._cut(kwargs[edge.name], edge)}
            place = names.index(edge.name)
            return (*args[:place], self._cut(args[place], edge), *args[place + 1 :]), dict(kwargs)

        layer.register_forward_pre_hook(cut, with_kwargs=True)

    def leave(self, layer: nn.Module, boundary: Boundary) -> None:
        """Gather the sequences when `layer` has been called."""
        edge = boundary.output
        assert edge is not None

        def gather(module: nn.Module, args: Any, found: Any) -> Any:
            del module, args
            return self.first_crossed(found, edge)

        layer.register_forward_hook(gather)

    def _cut(self, hidden: torch.Tensor, edge: Edge) -> torch.Tensor:
        self._length = hidden.shape[_DIM]
        return cross(hidden, edge, self._group)

    def _require_part(self, tensor: torch.Tensor, edge: Edge) -> None:
        if self._length is None or tensor.shape[_DIM] != -(-self._length // self._group.size()):
            found = f"{edge.name or 'a layer'} has {tensor.shape[_DIM]} tokens, not a part of {self._length}"
            raise RunError(f"accelerator.sequence_parallel: {found}; remove 'sequence_parallel'")


def _cuts(placement: Placement, tensor: torch.Tensor) -> bool:
    """Whether it is the tokens that lie in parts."""
    return placement.dim is not None and placement.dim % tensor.ndim == _DIM
