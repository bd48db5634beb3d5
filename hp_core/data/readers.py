"""One reader for each file format: rows with their places, and an exact place for whatever is broken."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hp_core.data.arrow_rows import read_arrow, read_parquet
from hp_core.data.csv_rows import read_csv
from hp_core.data.json_rows import holds_a_list, read_json, read_json_lines
from hp_core.data.records import Place, Row
from hp_core.data.units import BOM, COMPRESSED, BrokenFileError, Reader, Unit, failed, opened, require_utf8, single
from hp_core.errors import InputError


def read_rows(path: Path, fields: Sequence[str], part: int = 0) -> Iterator[Row | InputError]:
    """The rows of a file with a known ending, in order; a row that can't be read is an `InputError` in its stead.

    Its message begins with the file and the 1-based line (or row). What can't be read on from (a damaged Parquet
    file, broken JSON in a list, a quote in CSV that is never closed) is the last of the file; a file without rows is
    one such error.

    Args:
        path: the file.
        fields: those that will be used; a columnar format reads no others if it has them all.
        part: the file's number in its source, for `Row.place`.

    Raises:
        InputError: the file system fails to read the file.
    """
    for unit in read_units(path, fields, part):
        yield from unit()


def read_units(path: Path, fields: Sequence[str], part: int = 0) -> Iterator[Unit]:
    """What `read_rows` gives, in units that cost little while they are not called; lines are not parsed."""
    reader = READERS[ending_of(path)]
    is_empty = True
    try:
        for unit in reader(path, fields, part):
            is_empty = False
            yield unit
    except BrokenFileError as error:
        yield failed(str(error))
    except OSError as error:
        # Arrow puts the path into `strerror`.
        raise InputError(f"{path}: {os.strerror(error.errno) if error.errno else error}") from error
    else:
        if is_empty:
            yield failed(f"{path}: the file is empty: it holds no rows")


def ending_of(path: Path) -> str:
    """The file's ending by which its reader is chosen, such as `.jsonl` or `.jsonl.gz`, in lower case."""
    name = path.name.lower()
    suffix = Path(name).suffix
    return Path(name.removesuffix(suffix)).suffix + suffix if suffix in _PACKED else suffix


def location_of(path: Path, number: int) -> str:
    """The place of a row for messages; `number` is that of the row's `place`."""
    ending = ending_of(path).removesuffix(COMPRESSED)
    if ending == ".txt":
        return str(path)
    by_line = ending in (".jsonl", ".ndjson", ".csv") or (ending == ".json" and not holds_a_list(path))
    return f"{path}:{number}" if by_line else f"{path}: row {number}"


def _read_text(path: Path, fields: Sequence[str], part: int) -> Iterator[Unit]:
    """The whole file, as it is, but for a byte-order mark."""
    with opened(path) as file:
        content = file.read()
    require_utf8(path, content[:2])
    content = content.removeprefix(BOM)
    try:
        yield single(Row(str(path), {"text": content.decode()}, place=Place(part, 0)))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = error.start - content.rfind(b"\n", 0, error.start)
        yield failed(f"{path}:{line}: not valid UTF-8 (byte {byte} of the line)")


_PLAIN: Mapping[str, Reader] = {
    ".txt": _read_text,
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".json": read_json,
    ".csv": read_csv,
}

READERS: Mapping[str, Reader] = {
    **_PLAIN,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    **{f"{ending}{COMPRESSED}": reader for ending, reader in _PLAIN.items()},
}

_PACKED = frozenset({COMPRESSED, ".zst", ".bz2", ".xz", ".zip", ".lz4"})


def is_unread(path: Path) -> bool:
    """Whether a file is data of a known format, compressed in a way that no reader knows."""
    ending = ending_of(path)
    return ending not in READERS and Path(ending).stem in _PLAIN and Path(ending).suffix in _PACKED
