"""A sharding plan as plain data: boundaries, the placements of their parameters, the collectives at their edges."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from hp_core.parallel.plan.edge import REPLICATE, Edge, Placement, shard

Kind = Literal["attention", "mlp", "embedding", "head", "sequence", "contract", "replicated"]


@dataclass(frozen=True)
class ParameterPlan:
    """Where a parameter lies on the tensor axis, and what its gradient is there before FSDP sums it.

    Attributes:
        name: the name within the boundary's module.
        shape: the whole parameter's.
        shard_dim: the dimension that is cut evenly; None keeps it whole on every rank.
        partial: each rank's gradient is a part of the sum. Always False where `shard_dim` is set.
        num_slices: 1, or of how many slices along dimension 0 a rank computes with one although it holds all: several
            ranks share a slice.
    """

    name: str
    shape: tuple[int, ...]
    shard_dim: int | None = None
    partial: bool = False
    num_slices: int = 1

    @property
    def placement(self) -> Placement:
        """Where it lies, in the words of the sharding contract."""
        return REPLICATE if self.shard_dim is None else shard(self.shard_dim)

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        notes = [f"computes 1 of {self.num_slices} slices"] if self.num_slices > 1 else []
        notes += ["gradient partial"] if self.partial else []
        return f"{self.name} [{shape}]: {self.placement}" + (f" ({', '.join(notes)})" if notes else "")


@dataclass(frozen=True)
class Boundary:
    """A module whose parameters and edges are planned as one.

    Attributes:
        fqn: its name in the model.
        kind: `attention` and `mlp` compute on their own shards between their edges, `embedding` and `head` on their own
            part of the vocabulary, `sequence` on its part of every sequence; `replicated` computes the same on every
            tensor rank.
        module_type: the class's name.
        parameters: those of the module that no other boundary has.
        inputs: what happens to the inputs of its forward, and to their gradients.
        output: what happens to its output: that of `row` where there is one, else of the module itself.
        row: the child whose output the ranks add up.
        kv_groups: query heads that share a key and value head on a rank, where that differs from the model's.
        note: why what could be shared is replicated.
    """

    fqn: str
    kind: Kind
    module_type: str
    parameters: tuple[ParameterPlan, ...]
    inputs: tuple[Edge, ...] = ()
    output: Edge | None = None
    row: str | None = None
    kv_groups: int | None = None
    note: str = ""

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Those of the inputs and of the output."""
        return self.inputs if self.output is None else (*self.inputs, self.output)

    def lines(self) -> Iterator[str]:
        """The boundary in words, without its name."""
        yield self.kind + (f": {self.note}" if self.note else "")
        yield from (f"  {parameter}" for parameter in self.parameters)
        yield from (f"  input {edge}" for edge in self.inputs)
        if self.output is not None:
            yield f"  output {self.output}"


@dataclass(frozen=True)
class ShardingPlan:
    """How a model lies on its `tp_size` tensor ranks: every parameter is in exactly one boundary."""

    tp_size: int
    boundaries: tuple[Boundary, ...]

    @property
    def shared(self) -> tuple[Boundary, ...]:
        """The boundaries that are more than replicated: those to apply to a model."""
        return tuple(one for one in self.boundaries if one.kind != "replicated" or one.edges)

    @property
    def bytes_per_token(self) -> int:
        """The sizes of the tensors in all collectives, forward and backward, for each token."""
        collectives = (one for boundary in self.boundaries for edge in boundary.edges for one in edge.collectives)
        return sum(one.bytes_per_token for one in collectives)

    def has(self, fqn: str) -> bool:
        """Whether a module of this name is a boundary."""
        return any(one.fqn == fqn for one in self.boundaries)

    def explain(self, fqn: str | None = None) -> str:
        """The plan as text, layers that are planned alike together; with `fqn`, that boundary alone.

        Raises:
            KeyError: there is no boundary of that name.
        """
        chosen = self.boundaries if fqn is None else [one for one in self.boundaries if one.fqn == fqn]
        if not chosen:
            raise KeyError(f"no boundary {fqn!r}")
        lines = [f"tensor parallelism over {self.tp_size} ranks: {self.bytes_per_token:,} bytes a token in collectives"]
        for alike in _alike(chosen):
            first, *details = alike[0].lines()
            lines.append(f"{_joined([one.fqn for one in alike])} ({alike[0].module_type}): {first}")
            lines.extend(details)
        return "\n".join(lines)


def _alike(boundaries: Sequence[Boundary]) -> list[list[Boundary]]:
    """Boundaries that differ in the number of their layer alone, in the order of the first of each."""

    def key(one: Boundary) -> tuple[str, ...]:
        return (_numberless(one.fqn), one.module_type, *one.lines())

    order = {name: index for index, name in reversed(list(enumerate(map(key, boundaries))))}
    ordered = sorted(boundaries, key=lambda one: order[key(one)])
    return [list(group) for _, group in groupby(ordered, key)]


def _numberless(fqn: str) -> str:
    return re.sub(r"\b\d+\b", "*", fqn)


def _joined(fqns: Sequence[str]) -> str:
    return fqns[0] or "(model)" if len(fqns) == 1 else f"{_numberless(fqns[0])}, {len(fqns)} times"
