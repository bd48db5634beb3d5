"""One reader for each file format: rows with their places, and an exact place for whatever is broken."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hp_core.data.records import Place, Row
from hp_core.errors import InputError, Problem

_BOM = b"\xef\xbb\xbf"
_ARROW_FILE_MAGIC = b"ARROW1"


def read_rows(path: Path, fields: Sequence[str]) -> Iterator[Row]:
    """The rows of a file whose ending is in `READERS`, in order.

    `fields` are those that will be used; a columnar format reads no others if it has them all. Raises
    `InputError` with the file and the 1-based line (or row) of what can't be read, and for a file without rows.
    """
    num_rows = 0
    try:
        for row in READERS[path.suffix.lower()](path, fields):
            num_rows += 1
            yield row
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    if num_rows == 0:
        raise InputError(f"{path}: the file is empty: it holds no rows")


def _read_text(path: Path, fields: Sequence[str]) -> Iterator[Row]:
    content = path.read_bytes().removeprefix(_BOM)
    try:
        yield Row(str(path), {"text": content.decode()})
    except UnicodeDecodeError as error:
        raise _bad_utf8(path) from error


def _read_json_lines(path: Path, fields: Sequence[str]) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = (line.removeprefix(_BOM) if number == 1 else line).strip()
            if content:
                location = f"{path}:{number}"
                yield Row(location, _json_object(_parse_json(content, location), location), place=Place(0, number))


def _read_json(path: Path, fields: Sequence[str]) -> Iterator[Row]:
    """A list of objects, read whole, or one object a line, as `.jsonl`."""
    if not _holds_a_list(path):
        try:
            yield from _read_json_lines(path, fields)
        except InputError as error:
            raise InputError(
                Problem(str(error), hint="a .json file holds a list of objects, or one object a line")
            ) from error
        return
    values = _parse_json(path.read_bytes().removeprefix(_BOM), str(path))
    for number, value in enumerate(values, start=1):
        location = f"{path}: row {number}"
        yield Row(location, _json_object(value, location), place=Place(0, number))


def _holds_a_list(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(_BOM).lstrip()[:1] == b"["


def location_of(path: Path, number: int) -> str:
    """The place of a row for messages, as `read_rows` gives it; `number` is that of the row's `place`."""
    suffix = path.suffix.lower()
    if suffix == ".txt":
        return str(path)
    by_line = suffix in (".jsonl", ".ndjson", ".csv") or (suffix == ".json" and not _holds_a_list(path))
    return f"{path}:{number}" if by_line else f"{path}: row {number}"


def _parse_json(content: bytes, location: str) -> Any:
    try:
        return json.loads(content.decode(), object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if b"\n" in content else f"column {error.colno}"
        raise InputError(f"{location}: not valid JSON: {error.msg} ({place})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{location}: not valid UTF-8 (byte {error.start + 1})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{location}: {error}") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is repeated")
    return unique


def _json_object(value: Any, location: str) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    raise InputError(f"{location}: a row must be a JSON object, this is a {type(value).__name__}")


def _read_csv(path: Path, fields: Sequence[str]) -> Iterator[Row]:
    """Comma-separated with a header line; every value is text, so `007` stays `007`."""
    # A document is often longer than csv's default limit of 131072 characters, which only the module can change.
    csv.field_size_limit(max(csv.field_size_limit(), 2**31 - 1))
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
            repeated = sorted({name for name in header if header.count(name) > 1})
            if repeated:
                raise InputError(f"{path}:1: the column {repeated[0]!r} is repeated")
            for cells in reader:
                if not cells:
                    continue
                location = f"{path}:{reader.line_num}"
                if len(cells) != len(header):
                    raise InputError(f"{location}: {len(cells)} cells under {len(header)} columns")
                yield Row(location, dict(zip(header, cells, strict=True)), False, Place(0, reader.line_num))
        except csv.Error as error:
            raise InputError(f"{path}:{reader.line_num}: not valid CSV: {error}") from error
        except UnicodeDecodeError as error:
            raise _bad_utf8(path) from error


def _read_parquet(path: Path, fields: Sequence[str]) -> Iterator[Row]:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        with pq.ParquetFile(path) as file:
            batches = file.iter_batches(columns=_used_columns(file.schema_arrow.names, fields))
            yield from _arrow_rows(path, batches)
    except pa.ArrowException as error:
        raise InputError(f"{path}: not a valid Parquet file: {error}") from error


def _read_arrow(path: Path, fields: Sequence[str]) -> Iterator[Row]:
    """Arrow's file format and its stream format, which `datasets` writes."""
    import pyarrow as pa

    with path.open("rb") as file:
        is_file_format = file.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
    try:
        with pa.memory_map(str(path)) as source:
            if is_file_format:
                reader = pa.ipc.open_file(source)
                batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                reader = batches = pa.ipc.open_stream(source)
            columns = _used_columns(reader.schema.names, fields)
            yield from _arrow_rows(path, (batch if columns is None else batch.select(columns) for batch in batches))
    except pa.ArrowException as error:
        raise InputError(f"{path}: not a valid Arrow file: {error}") from error


def _used_columns(available: Sequence[str], fields: Sequence[str]) -> list[str] | None:
    """The columns to read; None for all, so that the message about a missing field can list them."""
    return list(dict.fromkeys(fields)) if set(fields) <= set(available) else None


def _arrow_rows(path: Path, batches: Iterator[Any]) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for fields in batch.to_pylist():
            number += 1
            yield Row(f"{path}: row {number}", fields, place=Place(0, number))


def _bad_utf8(path: Path) -> InputError:
    """Finds the line: a text decoder reads ahead, and a UTF-8 character never holds a line end."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return InputError(f"{path}:{number}: not valid UTF-8 (byte {error.start + 1} of the line)")
    return InputError(f"{path}: not valid UTF-8")


Reader = Callable[[Path, Sequence[str]], Iterator[Row]]

READERS: Mapping[str, Reader] = {
    ".txt": _read_text,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
