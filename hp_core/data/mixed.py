"""The rows of several sources as one dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from hp_core.data.fingerprint import fingerprint
from hp_core.data.packing import PackedRows
from hp_core.data.protocols import DataReport, Sample


class MixedRows:
    """The rows of named parts one part after the other, numbered through; a row holds documents of one part only."""

    def __init__(self, parts: Sequence[PackedRows], names: Sequence[str]) -> None:
        if not parts or len(parts) != len(names) or len({part.max_seq_len for part in parts}) != 1:
            raise ValueError(f"{len(parts)} parts called {list(names)} can't be one dataset")
        self.parts = tuple(parts)
        self.names = tuple(names)
        self.sizes = tuple(map(len, parts))
        self.max_seq_len = parts[0].max_seq_len
        self.report = DataReport.total([part.report for part in parts])
        self.fingerprint = fingerprint(
            "mixed rows", *(one for pair in zip(names, parts, strict=True) for one in (pair[0], pair[1].fingerprint))
        )
        self._ends = np.cumsum(self.sizes)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the recipe asks for; every part has the same."""
        return self.parts[0].columns

    def part_of(self, index: int) -> int:
        """The number of the part that the row belongs to."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return int(np.searchsorted(self._ends, index, side="right"))

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, index: int, /) -> Sample:
        number = self.part_of(index)
        row = self.parts[number][index - int(self._ends[number]) + self.sizes[number]]
        return cast(Sample, {**row, "index": int(index)})
