"""From rows to the files of a token store, batch by batch."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hp_core.data.records import DocumentEncoder, Encoded, Place, Row, Source
from hp_core.errors import InputError

_BATCH_ROWS = 1000
_BATCH_CHARACTERS = 4_000_000
_COPIED_TOKENS = 1 << 20


class Placed(NamedTuple):
    """What became of one row, and where the row stands."""

    encoded: Encoded | InputError
    place: Place


def encoded_batches(source: Source, encoder: DocumentEncoder) -> Iterator[list[Placed]]:
    """The source's rows, encoded, in order."""
    for batch in batches(source.rows(encoder.fields)):
        yield encode_batch(batch, encoder)


def encode_batch(batch: list[Row | InputError], encoder: DocumentEncoder) -> list[Placed]:
    """Each row encoded, or what is wrong with it."""
    rows = [row for row in batch if isinstance(row, Row)]
    encoded = iter(encoder.encode(rows))
    return [Placed(next(encoded), row.place) if isinstance(row, Row) else Placed(row, Place()) for row in batch]


def batches(rows: Iterable[Row | InputError]) -> Iterator[list[Row | InputError]]:
    """Batches that are large enough to encode at once and bounded in memory, however long documents are."""
    batch: list[Row | InputError] = []
    characters = 0
    for row in rows:
        batch.append(row)
        if isinstance(row, Row):
            characters += num_characters(row.fields)
        if len(batch) >= _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def num_characters(value: Any) -> int:
    """How much text there is in a value, however deep."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(num_characters, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(num_characters, value))
    return 0


class StoreWriter:
    """Writes documents to the files of a token store. Ids take two bytes until one needs four."""

    def __init__(self, directory: Path, encoder: DocumentEncoder) -> None:
        self.directory = directory
        self.dtype: np.dtype[np.unsignedinteger] = np.dtype(np.uint16)
        self.num_tokens = 0
        self._encoder = encoder
        self._lengths, self._hashes, self._places, self._values = array("q"), array("Q"), array("q"), array("f")
        self._tokens: IO[bytes] = (directory / "tokens.bin").open("wb")
        self._trained = (directory / "trained.bin").open("wb") if encoder.has_mask else None
        self._weights = (directory / "weights.bin").open("wb") if encoder.has_weights else None

    @property
    def num_documents(self) -> int:
        """How many have been written."""
        return len(self._lengths)

    def add(self, document: Encoded, place: Place) -> None:
        """Append one document."""
        self._require_declared(document)
        ids, size = document.ids, len(document.ids)
        if size and self.dtype.itemsize == 2 and ids.max() >= 2**16:
            self._widen()
        self._tokens.write(ids.astype(self.dtype).tobytes())
        if self._trained is not None:
            trained = np.ones(size, dtype=np.bool_) if document.trained is None else document.trained
            self._trained.write(trained.astype(np.bool_).tobytes())
        if self._weights is not None:
            weights = np.ones(size, dtype=np.float32) if document.weights is None else document.weights
            self._weights.write(weights.astype(np.float32).tobytes())
        self.num_tokens += size
        self._lengths.append(size)
        self._hashes.append(document.split_hash)
        self._places.extend(place)
        self._values.extend(document.values)

    def _require_declared(self, document: Encoded) -> None:
        """Raise `ValueError` for a document that isn't what its encoder says: a fault of the encoder's author."""
        encoder, size = self._encoder, len(document.ids)
        if len(document.values) != len(encoder.columns):
            raise ValueError(f"a document has {len(document.values)} values for the columns {encoder.columns}")
        parts = (("trained", document.trained, encoder.has_mask), ("weights", document.weights, encoder.has_weights))
        for name, part, is_declared in parts:
            if part is not None and not is_declared:
                raise ValueError(f"a document has {name}, and its encoder declares none")
            if part is not None and len(part) != size:
                raise ValueError(f"a document of {size} tokens has {len(part)} {name}")

    def _widen(self) -> None:
        self._tokens.close()
        path, narrow = self.directory / "tokens.bin", self.directory / "narrow.bin"
        path.rename(narrow)
        self.dtype = np.dtype(np.uint32)
        self._tokens = path.open("wb")
        with narrow.open("rb") as file:
            while len(held := np.fromfile(file, dtype=np.uint16, count=_COPIED_TOKENS)):
                self._tokens.write(held.astype(self.dtype).tobytes())
        narrow.unlink()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for file in (self._tokens, self._trained, self._weights):
            if file is not None:
                file.close()
        if error is None:
            self._save("lengths", np.frombuffer(self._lengths, dtype=np.int64))
            self._save("hashes", np.frombuffer(self._hashes, dtype=np.uint64))
            self._save("places", np.frombuffer(self._places, dtype=np.int64).reshape(-1, 2))
            if columns := self._encoder.columns:
                self._save("columns", np.frombuffer(self._values, dtype=np.float32).reshape(-1, len(columns)))

    def _save(self, name: str, values: NDArray[Any]) -> None:
        np.save(self.directory / f"{name}.npy", values)
