"""Best-fit decreasing: sizes into as few bins as the rule gives, computed over the histogram of the sizes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def best_fit_decreasing(sizes: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The bin of each item, numbered in the order in which bins are opened.

    The rule: the largest item first, each into the fullest bin that has room for it, a new bin where none has. It
    takes the time of the histogram, not of the items: all bins of the same room take the items of one size together.
    Among bins of the same room the one that has had it for longest comes first, so the result is deterministic.

    Args:
        sizes: from 1 to `capacity`.
        capacity: what a bin holds.
    """
    if sizes.size and not 1 <= sizes.min() <= sizes.max() <= capacity:
        raise ValueError(f"sizes from {sizes.min()} to {sizes.max()} don't fit bins of {capacity}")
    order = np.argsort(-sizes, kind="stable")
    distinct, counts = np.unique(sizes, return_counts=True)
    bin_of = np.empty(len(sizes), dtype=np.int64)
    rooms = _Rooms(capacity)
    done = 0
    for size, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        items = order[done : done + count]
        bin_of[items] = rooms.fill(size, count)
        done += count
    return bin_of


class _Rooms:
    """The open bins by how much room they have left."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_bins = 0
        self._number = np.zeros(capacity + 1, dtype=np.int64)
        self._bins: list[list[NDArray[np.int64]]] = [[] for _ in range(capacity + 1)]

    def fill(self, size: int, count: int) -> NDArray[np.int64]:
        """The bins of `count` items of one size.

        A bin stays the fullest with room until no item of this size fits any more, so it takes them in a row, and
        bins that had more room before can't have become candidates meanwhile.
        """
        taken: list[NDArray[np.int64]] = []
        for room in (np.flatnonzero(self._number[size:]) + size).tolist():
            if count == 0:
                break
            count -= self._into(self._take(room, -(-count // (room // size))), room, size, count, taken)
        if count:
            num_new = -(-count // (self.capacity // size))
            opened = np.arange(self.num_bins, self.num_bins + num_new)
            self.num_bins += num_new
            self._into(opened, self.capacity, size, count, taken)
        return np.concatenate(taken)

    def _into(self, bins: NDArray[np.int64], room: int, size: int, count: int, taken: list[NDArray[np.int64]]) -> int:
        """Put up to `count` items into bins that all have `room`; returns how many."""
        each = room // size
        placed = min(count, len(bins) * each)
        taken.append(np.repeat(bins, each)[:placed])
        full, rest = divmod(placed, each)
        self._put(bins[:full], room - each * size)
        if rest:
            self._put(bins[full:], room - rest * size)
        return placed

    def _take(self, room: int, number: int) -> NDArray[np.int64]:
        """The first `number` bins that have the room, or all if there are fewer."""
        held = np.concatenate(self._bins[room])
        taken, left = held[:number], held[number:]
        self._bins[room] = [left] if len(left) else []
        self._number[room] = len(left)
        return taken

    def _put(self, bins: NDArray[np.int64], room: int) -> None:
        if len(bins):
            self._bins[room].append(bins)
            self._number[room] += len(bins)
