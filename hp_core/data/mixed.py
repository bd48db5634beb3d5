"""The rows of several sources as one dataset."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray

from hp_core.data.fingerprint import fingerprint
from hp_core.data.mixture import Mixture
from hp_core.data.packing import PackedRows
from hp_core.data.protocols import DataReport, Sample


class MixedRows:
    """The rows of named parts one part after the other, numbered through; a row holds documents of one part only.

    Without a `mixture`, an epoch takes each row once.
    """

    def __init__(self, parts: Sequence[PackedRows], names: Sequence[str], mixture: Mixture | None = None) -> None:
        if not parts or len(parts) != len(names) or len({part.max_seq_len for part in parts}) != 1:
            raise ValueError(f"{len(parts)} parts called {list(names)} can't be one dataset")
        self.parts = tuple(parts)
        self.names = tuple(names)
        self.sizes = tuple(map(len, parts))
        self.max_seq_len = parts[0].max_seq_len
        self.mixture = mixture
        self.report = DataReport.total([part.report for part in parts])
        identity: list[str | int] = []
        for name, part in zip(names, parts, strict=True):
            identity += (name, part.fingerprint)
        if mixture is not None:
            identity += ("mixture", *mixture.counts)
        self.fingerprint = fingerprint("mixed rows", *identity)
        self._ends = np.cumsum(self.sizes)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the recipe asks for; every part has the same."""
        return self.parts[0].columns

    @property
    def has_images(self) -> bool:
        """Whether some row has an image."""
        return any(part.has_images for part in self.parts)

    def part_of(self, index: int) -> int:
        """The number of the part that the row belongs to."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return int(np.searchsorted(self._ends, index, side="right"))

    @property
    def epoch_rows(self) -> tuple[int, ...]:
        """How many rows an epoch takes of each part."""
        return self.sizes if self.mixture is None else self.mixture.counts

    def amounts(self, rows: NDArray[np.int64]) -> dict[str, tuple[int, int]]:
        """How many of some rows, which may be repeated, each part has, and how many targets they have."""
        parts = np.searchsorted(self._ends, rows, side="right")
        counts = np.bincount(parts, minlength=len(self.parts))
        targets = [int(self._row_targets[rows[parts == number]].sum()) for number in range(len(self.parts))]
        return {name: (int(counts[number]), targets[number]) for number, name in enumerate(self.names)}

    @cached_property
    def _row_targets(self) -> NDArray[np.int64]:
        return np.concatenate([part.row_targets for part in self.parts])

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, index: int, /) -> Sample:
        number = self.part_of(index)
        row = self.parts[number][index - int(self._ends[number]) + self.sizes[number]]
        return cast(Sample, {**row, "index": int(index)})
