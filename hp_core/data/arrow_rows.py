"""Rows of Parquet and Arrow files, batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from hp_core.data.records import Place, Row, columns_to_read
from hp_core.data.units import BrokenFileError, Unit
from hp_core.errors import InputError

_ARROW_FILE_MAGIC = b"ARROW1"
_BATCH_ROWS = 1024


def read_parquet(path: Path, fields: Sequence[str], part: int) -> Iterator[Unit]:
    """The rows of a Parquet file."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        with pq.ParquetFile(path) as file:
            columns = columns_to_read(file.schema_arrow.names, fields)
            yield from _rows(path, part, file.iter_batches(batch_size=_BATCH_ROWS, columns=columns))
    except (pa.ArrowException, OSError) as error:
        raise _broken(path, "Parquet", error) from error


def read_arrow(path: Path, fields: Sequence[str], part: int) -> Iterator[Unit]:
    """The rows of a file in Arrow's file format, or in its stream format, which `datasets` writes."""
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
            columns = columns_to_read(reader.schema.names, fields)
            yield from _rows(path, part, (batch if columns is None else batch.select(columns) for batch in batches))
    except (pa.ArrowException, OSError) as error:
        raise _broken(path, "Arrow", error) from error


def _broken(path: Path, kind: str, error: Exception) -> Exception:
    if isinstance(error, OSError) and error.errno is not None:
        return error  # the file system's, not the file's: Arrow tells both by the same type
    return BrokenFileError(f"{path}: not a valid {kind} file: {' '.join(str(error).split())}")


def _rows(path: Path, part: int, batches: Iterable[Any]) -> Iterator[Unit]:
    first = 1
    for batch in batches:
        # Cut up, because one that is passed over is not converted, and one that is needs Python objects for all of it.
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            piece = _Batch(path, part, first + start, batch.slice(start, _BATCH_ROWS))
            for index in range(piece.num_rows):
                yield partial(piece.row, index)
        first += batch.num_rows


class _Batch:
    """Some rows of a file, converted when the first of them is asked for."""

    def __init__(self, path: Path, part: int, first: int, batch: Any) -> None:
        self.path = path
        self.part = part
        self.first = first
        self.batch = batch
        self.num_rows: int = batch.num_rows

    def row(self, index: int) -> Sequence[Row | InputError]:
        return [self._values[index]]

    @cached_property
    def _values(self) -> list[Row | InputError]:
        try:
            return [self._row(index, fields) for index, fields in enumerate(self.batch.to_pylist())]
        except (ValueError, OverflowError):
            return [self._converted(index) for index in range(self.num_rows)]

    def _row(self, index: int, fields: dict[str, Any]) -> Row:
        number = self.first + index
        return Row(f"{self.path}: row {number}", fields, place=Place(self.part, number))

    def _converted(self, index: int) -> Row | InputError:
        """One row by itself, because one that can't be converted is no fault of the others."""
        fields: dict[str, Any] = {}
        for name in self.batch.schema.names:
            try:
                fields[name] = self.batch.column(name)[index].as_py()
            except UnicodeDecodeError as error:
                where = f"byte {error.start + 1} of the text"
                return InputError(f"{self.path}: row {self.first + index}: {name}: not valid UTF-8 ({where})")
            except (ValueError, OverflowError) as error:
                return InputError(f"{self.path}: row {self.first + index}: {name}: {error}")
        return self._row(index, fields)
