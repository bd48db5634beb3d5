"""The words of the sharding contract: how a tensor lies on the tensor ranks, and what happens where that changes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Placement:
    """How a tensor lies on the tensor ranks: whole on each, cut along a dimension, or as summands of it.

    Attributes:
        kind: `replicate`, `shard` or `partial`.
        dim: the dimension that is cut; None for the others.
    """

    kind: Literal["replicate", "shard", "partial"]
    dim: int | None = None

    def __str__(self) -> str:
        return self.kind if self.dim is None else f"{self.kind}({self.dim})"

    @classmethod
    def parse(cls, text: str) -> Placement:
        """The placement that `str` writes as `text`.

        Raises:
            ValueError: it is none.
        """
        for one in (REPLICATE, PARTIAL):
            if text == one.kind:
                return one
        if found := re.fullmatch(r"shard\((-?\d+)\)", text):
            return shard(int(found[1]))
        raise ValueError(f"expected 'replicate', 'partial' or 'shard(N)', got {text!r}")


REPLICATE = Placement("replicate")
PARTIAL = Placement("partial")


def shard(dim: int) -> Placement:
    """Cut along a dimension."""
    return Placement("shard", dim)


@dataclass(frozen=True)
class Collective:
    """A collective at an edge: `features` numbers for each token, in one of the two passes."""

    name: str
    direction: Direction
    features: int
    itemsize: int

    @property
    def bytes_per_token(self) -> int:
        """The size of the whole tensor, for each token."""
        return self.features * self.itemsize

    def __str__(self) -> str:
        return f"{self.name} in {self.direction}, {self.bytes_per_token:,} bytes a token"


@dataclass(frozen=True)
class Edge:
    """A tensor that crosses into a boundary or out of it: how it lies before and after.

    Attributes:
        name: the argument of the forward, or the child that the output is of; empty for that of the module itself.
        src: how it lies where it comes from.
        dst: how it lies where it goes to.
        features: numbers for each token.
        itemsize: bytes of a number.
        is_shared: each rank uses it for its own share of the work, so that where it is whole, the gradient that comes
            back is a part of a sum.
    """

    name: str
    src: Placement
    dst: Placement
    features: int
    itemsize: int
    is_shared: bool = False

    @property
    def gradient(self) -> tuple[Placement, Placement]:
        """How the gradient lies where it comes from, which is beyond `dst`, and how it has to lie at `src`."""
        return _of_gradient(self.dst, PARTIAL if self.is_shared else REPLICATE), _of_gradient(self.src, REPLICATE)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """What the ranks do together, in the order of the passes."""
        passes: tuple[tuple[Direction, str | None], ...] = (
            ("forward", conversion(self.src, self.dst)),
            ("backward", conversion(*self.gradient)),
        )
        return tuple(
            Collective(name, direction, self.features, self.itemsize)
            for direction, name in passes
            if name is not None and name != "slice"
        )

    def __str__(self) -> str:
        done = "; ".join(map(str, self.collectives)) or "no collective"
        name = f"{self.name}: " if self.name else ""
        return f"{name}{self.src} -> {self.dst}: {done}"


def _of_gradient(placement: Placement, whole: Placement) -> Placement:
    """A shard has the gradient of a shard, and each summand the gradient of the sum."""
    if placement.kind == "shard":
        return placement
    return REPLICATE if placement.kind == "partial" else whole


def conversion(src: Placement, dst: Placement) -> str | None:
    """What makes `dst` of `src`: the name of a collective, `slice` where a rank needs no other, or None for nothing.

    Raises:
        ValueError: nothing does.
    """
    if src == dst and src.kind != "partial":
        return None
    known = {
        ("partial", "replicate"): "all_reduce",
        ("partial", "shard"): "reduce_scatter",
        ("shard", "replicate"): "all_gather",
        ("shard", "shard"): "all_to_all",
        ("replicate", "shard"): "slice",
    }
    name = known.get((src.kind, dst.kind))
    if name is None:
        raise ValueError(f"{src} can't become {dst}")
    return name
