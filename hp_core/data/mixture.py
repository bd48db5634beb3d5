"""How many rows of each source an epoch takes, and which."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from hp_core.data.shuffling import shuffled_passes
from hp_core.errors import ArgumentError


@dataclass(frozen=True)
class Mixture:
    """A weighted choice among sources whose rows are numbered one source after the other.

    `sizes` are the rows that each source has and `counts` those that an epoch takes of it. Each source is an endless
    sequence of passes over its rows, each in an order of its own, and an epoch goes on where the one before ended. So
    every row of a source is taken before one of them is taken again, across epochs too.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        sizes: Sequence[int],
        *,
        weights: Sequence[float] | None = None,
        temperature: float | None = None,
    ) -> Mixture:
        """An epoch of as many rows as all sources have, dealt by `weights` or by the sizes' `1 / temperature` power.

        Give one of the two. Raises `ArgumentError` for a source of which an epoch would take nothing.
        """
        if (weights is None) == (temperature is None):
            raise ValueError("give either weights or a temperature")
        if weights is None:
            assert temperature is not None
            largest = max(sizes)
            weights = [(size / largest) ** (1 / temperature) for size in sizes]
            if not all(weights):
                raise ArgumentError("temperature", f"{temperature} leaves small sources nothing", "raise it")
        counts = largest_remainders(sum(sizes), weights)
        for name, count in zip(names, counts, strict=True):
            if count == 0:
                raise ArgumentError(
                    f"sources.{name}", f"an epoch of {sum(sizes)} rows would take none of it", "raise its weight"
                )
        return cls(tuple(names), tuple(sizes), tuple(counts))

    @property
    def num_rows(self) -> int:
        """How many rows an epoch has."""
        return sum(self.counts)

    def epoch_rows(self, epoch: int, stream: str) -> NDArray[np.int64]:
        """The rows of an epoch, source by source; `stream` stands for the data and the seed."""
        first, taken = 0, []
        for name, size, count in zip(self.names, self.sizes, self.counts, strict=True):
            begin, end = epoch * count, (epoch + 1) * count
            passes = range(begin // size, -(-end // size))
            rows = shuffled_passes(f"{stream}:source {name}", size, passes.start, len(passes)).reshape(-1)
            taken.append(first + rows[begin - passes.start * size : end - passes.start * size])
            first += size
        return np.concatenate(taken)


def largest_remainders(total: int, weights: Sequence[float]) -> list[int]:
    """`total` cut into whole numbers in proportion to positive `weights`: rounded down, the rest to the largest rests.

    Exact in the given floats; of equal rests, the first is served first.
    """
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ValueError(f"the weights {list(weights)} must be positive")
    exact = [Fraction(weight) for weight in weights]
    quotas = [total * weight / sum(exact) for weight in exact]
    counts = [math.floor(quota) for quota in quotas]
    by_rest = sorted(range(len(quotas)), key=lambda number: counts[number] - quotas[number])
    for number in by_rest[: total - sum(counts)]:
        counts[number] += 1
    return counts
