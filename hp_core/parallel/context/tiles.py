"""Which runs of a sequence's tokens see which others: known on the host, before a single score is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Sight = Literal["none", "some", "all"]


@dataclass(frozen=True)
class Tile:
    """Neighbouring tokens of a sequence that one rank holds next to each other.

    Args:
        tokens: where the rank holds them.
        first: the position of the first in the whole sequence.
        last: that of the last.
        documents: for each row, the documents of its first and of its last token; they are numbered in order.
    """

    tokens: slice
    first: int
    last: int
    documents: tuple[tuple[int, int], ...]

    def sees(self, other: Tile, window: int | None = None) -> Sight:
        """Whether each token, some or none of this tile sees those of `other` in any row.

        A token sees itself and what is before it in its document, with a `window` the last so many of these.
        """
        nearest, farthest = self.first - other.last, self.last - other.first
        pairs = list(zip(self.documents, other.documents, strict=True))
        are_apart = all(theirs[1] < own[0] or own[1] < theirs[0] for own, theirs in pairs)
        if farthest < 0 or are_apart or (window is not None and nearest >= window):
            return "none"
        are_one = all(own == theirs and own[0] == own[1] for own, theirs in pairs)
        if nearest >= 0 and are_one and (window is None or farthest < window):
            return "all"
        return "some"


def tiles_of(positions: torch.Tensor, documents: torch.Tensor, size: int) -> tuple[Tile, ...]:
    """A rank's tokens as tiles of at most `size`.

    Args:
        positions: (own tokens,) where they are in the whole sequence, on the host.
        documents: (rows, own tokens) which document each belongs to.
        size: the most tokens of a tile.
    """
    bounds = list(_bounds(positions, size))
    edges = torch.tensor([[tokens.start, tokens.stop - 1] for tokens in bounds])
    firsts, lasts = positions[edges].T.tolist()
    by_tile: Sequence[list[list[int]]] = documents[:, edges].movedim(1, 0).tolist()
    return tuple(
        Tile(tokens, first, last, tuple((one[0], one[1]) for one in rows))
        for tokens, first, last, rows in zip(bounds, firsts, lasts, by_tile, strict=True)
    )


def _bounds(positions: torch.Tensor, size: int) -> Iterator[slice]:
    breaks = (torch.nonzero(positions.diff() != 1).flatten() + 1).tolist()
    starts = [0, *breaks]
    for start, stop in zip(starts, [*breaks, len(positions)], strict=True):
        yield from (slice(at, min(at + size, stop)) for at in range(start, stop, size))
