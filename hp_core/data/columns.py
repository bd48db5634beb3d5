"""Numbers that stand beside each document's text, and what becomes of them on the way to a loss."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_core.data.fields import field_of
from hp_core.data.records import Row
from hp_core.errors import ArgumentError, InputError

# What rows and batches hold already; `…_labels` are counted as targets, so a column of weights must not be called so.
RESERVED = frozenset({"index", "input_ids", "labels", "position_ids", "is_padding", "sample_ids", "model_output"})

_WRITTEN_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class RowColumns:
    """Takes the numbers called `names` out of a row; there may be none."""

    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, names: Sequence[str] | None) -> RowColumns:
        """The columns of these names. Raises `ArgumentError` for a name that is empty, repeated or taken."""
        checked: list[str] = []
        for number, name in enumerate(names or ()):
            path = f"columns[{number}]"
            if not name:
                raise ArgumentError(path, "the name of a column is empty")
            if name in checked:
                raise ArgumentError(path, f"the column {name!r} is repeated")
            if name in RESERVED or name.endswith("_labels"):
                raise ArgumentError(path, f"a column can't be called {name!r}, which has a meaning of its own in a row")
            checked.append(name)
        return cls(tuple(checked))

    def __call__(self, row: Row) -> tuple[float, ...]:
        """The row's numbers, each of which float32 can hold.

        Raises `InputError` with the row's place for a field that is missing or null, a list, a bool, a text (in CSV,
        one that isn't a number), NaN, infinity, a number beyond float32's range, or a whole number that float32 would
        change, as it does with many above 2**24.
        """
        return tuple(_number(row, name) for name in self.names)


def _number(row: Row, name: str) -> float:
    value = field_of(row, name)
    if isinstance(value, str) and not row.is_typed:
        value = _parse(value)
    fault = float32_fault(value)
    if fault is not None:
        raise InputError(f"{row.location}: column {name!r} {fault}")
    return float(value)


def _parse(text: str) -> Any:
    """A number written out; an empty cell is None, and anything else stays as it is."""
    written = text.strip()
    if not written:
        return None
    if not _WRITTEN_NUMBER.fullmatch(written):
        return text
    # A whole number goes through int, because float would round it before anyone could see.
    return int(written) if written.lstrip("+-").isdigit() and len(written) < 100 else float(written)


def float32_fault(value: Any) -> str | None:
    """What keeps a value from being a float32, or None."""
    if value is None:
        return "is null; every document needs a number"
    if isinstance(value, (list, tuple)):
        return "is a list; it must be one number for the whole document, whose tokens are not known yet"
    if isinstance(value, str):
        return f"is the text {value!r}, not a number"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"is {value!r} of type {type(value).__name__}, not a number"
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value}, which is not finite"
    if abs(value) > _LARGEST:
        return "is beyond the range of float32"
    held = float(np.float32(value))
    if held == 0 and value != 0:
        return f"is {value}, which float32 would round to 0"
    if held != value and float(value).is_integer():
        return f"is {value}, a whole number that float32 would change to {held:.0f}"
    return None
