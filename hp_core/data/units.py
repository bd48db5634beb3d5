"""What the readers of all file formats share: units, places, opening a file, and faults of encoding."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from hp_core.data.records import Row
from hp_core.errors import InputError

BOM = b"\xef\xbb\xbf"
COMPRESSED = ".gz"

Unit = Callable[[], Sequence[Row | InputError]]
"""What of a file is read or passed over as one: a line, or a row. Called, it is parsed and gives its rows or faults."""

Reader = Callable[[Path, Sequence[str], int], Iterator[Unit]]
"""Takes the path, the fields that will be used and the file's number in its source; gives the file's units."""


def failed(fault: str) -> Unit:
    """A unit that holds nothing but a fault."""
    error = InputError(fault)
    return lambda: [error]


def single(row: Row | InputError) -> Unit:
    """A unit of one row that is parsed already."""
    return lambda: [row]


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, decompressed where its ending says so. Raises `BrokenFileError` for a damaged gzip file."""
    if path.suffix.lower() != COMPRESSED:
        with path.open("rb") as file:
            yield file
        return
    try:
        with gzip.open(path) as unpacked:
            yield cast(BinaryIO, unpacked)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise BrokenFileError(f"{path}: not a valid gzip file: {error}") from error


class BrokenFileError(Exception):
    """A file can't be read on from here; the message is that of the fault it ends with."""


def require_utf8(path: Path, head: bytes) -> None:
    """Refuse a file whose first bytes are those of another Unicode encoding. Raises `BrokenFileError`."""
    marked = head[:2] in (b"\xff\xfe", b"\xfe\xff")
    # Text without a mark begins with ASCII nearly always: `{`, a quote, a column's name.
    unmarked = len(head) >= 2 and (head[0] == 0) != (head[1] == 0)
    if marked or unmarked:
        raise BrokenFileError(
            f"{path}: the file is UTF-16 or UTF-32, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8 {path.name}"
        )
