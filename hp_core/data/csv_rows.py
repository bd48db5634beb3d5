"""Rows of CSV files, which may span lines."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from hp_core.data.records import Place, Row
from hp_core.data.units import Unit, failed, opened, require_utf8, single
from hp_core.errors import InputError


def read_csv(path: Path, fields: Sequence[str], part: int) -> Iterator[Unit]:
    """Comma-separated with a header line; every value is text, so `007` stays `007`.

    After a faulty row the next line begins the next one. A quote that is never closed ends the file.
    """
    # A document is often longer than csv's default limit of 131072 characters, which only the module can change.
    csv.field_size_limit(max(csv.field_size_limit(), 2**31 - 1))
    with opened(path) as binary:
        require_utf8(path, binary.read(4))
        binary.seek(0)
        with io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            lines = _Lines(path, file)
            reader = csv.reader(lines, strict=True)
            header: list[str] | None = None
            while True:
                cells = _next_row(reader, lines)
                if cells is None:
                    return
                location = f"{path}:{lines.first}"
                if isinstance(cells, InputError):
                    yield single(cells)
                    if header is None or lines.is_done:
                        return
                elif header is None:
                    header = cells
                    repeated = sorted({name for name in header if header.count(name) > 1})
                    if repeated:
                        yield failed(f"{location}: the column {repeated[0]!r} is repeated")
                        return
                elif len(cells) != len(header):
                    yield failed(f"{location}: {len(cells)} cells under {len(header)} columns")
                else:
                    values = dict(zip(header, cells, strict=True))
                    yield single(Row(location, values, is_typed=False, place=Place(part, lines.first)))


def _next_row(reader: Iterator[list[str]], lines: _Lines) -> list[str] | InputError | None:
    """The cells of the next row that isn't blank, what is wrong with it, or None at the end."""
    while True:
        lines.begin_row()
        try:
            cells = next(reader)
        except StopIteration:
            return None
        except csv.Error as error:
            if lines.is_done:
                return InputError(f"{lines.path}:{lines.first}: not valid CSV: a quote in this row is never closed")
            return InputError(f"{lines.path}:{lines.last}: not valid CSV: {error}")
        if lines.fault is not None:
            return lines.fault
        if cells:
            return cells


class _Lines:
    """The lines of a file, which knows which of them make up the present row and whether they are UTF-8."""

    def __init__(self, path: Path, file: io.TextIOWrapper) -> None:
        self.path = path
        self.first = 0
        self.last = 0
        self.fault: InputError | None = None
        self.is_done = False
        self._file = file

    def begin_row(self) -> None:
        self.first = self.last + 1
        self.fault = None

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        try:
            line = next(self._file)
        except StopIteration:
            self.is_done = True
            raise
        self.last += 1
        if not line.isascii() and self.fault is None:
            try:
                line.encode()
            except UnicodeEncodeError as error:
                byte = len(line[: error.start].encode(errors="surrogateescape")) + 1
                self.fault = InputError(f"{self.path}:{self.last}: not valid UTF-8 (byte {byte} of the line)")
        return line
