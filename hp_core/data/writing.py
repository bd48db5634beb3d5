"""From rows to the files of a token store, batch by batch."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hp_core.data.images.table import RECORD, ImageTable, Records
from hp_core.data.records import DocumentEncoder, Encoded, Place, Row
from hp_core.errors import InputError

IMAGE_BYTES = "images.bin"
_BATCH_ROWS = 1000
_BATCH_CHARACTERS = 1_000_000
_COPIED_TOKENS = 1 << 20


class Placed(NamedTuple):
    """What became of one row, and where the row stands."""

    encoded: Encoded | InputError
    place: Place


def encode_batch(batch: list[Row | InputError], encoder: DocumentEncoder) -> list[Placed]:
    """Each row encoded, or what is wrong with it."""
    rows = [row for row in batch if isinstance(row, Row)]
    encoded = iter(encoder.encode(rows))
    return [Placed(next(encoded), row.place) if isinstance(row, Row) else Placed(row, Place()) for row in batch]


def batches(rows: Iterable[Row | InputError]) -> Iterator[list[Row | InputError]]:
    """Batches that are large enough to send to a process, and bounded in memory, however long documents are."""
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
    """How much text, or how many bytes, there are in a value, however deep."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return sum(map(num_characters, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(num_characters, value))
    return 0


@dataclass(frozen=True, eq=False)
class EncodedBatch:
    """Documents as few arrays, which are quick to send and to write, and what is wrong with the rows that are none.

    `ids` are those of all documents end to end, `trained` and `weights` likewise, or None for an encoder without; the
    others are `[documents, …]`.
    """

    ids: NDArray[np.uint32]
    trained: NDArray[np.bool_] | None
    weights: NDArray[np.float32] | None
    lengths: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    places: NDArray[np.int64]
    values: NDArray[np.float32]
    faults: tuple[InputError, ...]
    images: ImageTable | None = None

    @classmethod
    def of(cls, rows: Sequence[Placed], encoder: DocumentEncoder) -> EncodedBatch:
        """The rows' documents. Raises `ValueError` for one that isn't what the encoder declares."""
        held = [(row.encoded, row.place) for row in rows if isinstance(row.encoded, Encoded)]
        documents = [document for document, _ in held]
        for document in documents:
            _require_declared(document, encoder)
        ids = _joined([document.ids for document in documents], np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < 2**32:
            raise ValueError(f"ids from {ids.min()} to {ids.max()} don't fit four bytes")
        trained: NDArray[np.bool_] | None = None
        weights: NDArray[np.float32] | None = None
        if encoder.has_mask:
            trained = _joined(
                [np.ones(len(one.ids), np.bool_) if one.trained is None else one.trained for one in documents],
                np.bool_,
            )
        if encoder.has_weights:
            weights = _joined(
                [np.ones(len(one.ids), np.float32) if one.weights is None else one.weights for one in documents],
                np.float32,
            )
        return cls(
            ids=ids.astype(np.uint32),
            trained=trained,
            weights=weights,
            lengths=np.array([len(one.ids) for one in documents], dtype=np.int64),
            hashes=np.array([one.split_hash for one in documents], dtype=np.uint64),
            places=np.array([place for _, place in held], dtype=np.int64).reshape(-1, 2),
            values=np.array([one.values for one in documents], dtype=np.float32).reshape(
                len(held), len(encoder.columns)
            ),
            faults=tuple(row.encoded for row in rows if isinstance(row.encoded, InputError)),
            images=ImageTable.of([one.images for one in documents]) if encoder.has_images else None,
        )


def _joined(parts: Sequence[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)


def _require_declared(document: Encoded, encoder: DocumentEncoder) -> None:
    """Raise `ValueError` for a document that isn't what its encoder says: a fault of the encoder's author."""
    size = len(document.ids)
    if document.images and not encoder.has_images:
        raise ValueError("a document has images, and its encoder declares none")
    if len(document.values) != len(encoder.columns):
        raise ValueError(f"a document has {len(document.values)} values for the columns {encoder.columns}")
    parts = (("trained", document.trained, encoder.has_mask), ("weights", document.weights, encoder.has_weights))
    for name, part, is_declared in parts:
        if part is not None and not is_declared:
            raise ValueError(f"a document has {name}, and its encoder declares none")
        if part is not None and len(part) != size:
            raise ValueError(f"a document of {size} tokens has {len(part)} {name}")


class StoreWriter:
    """Writes documents to the files of a token store. Ids take two bytes until one needs four."""

    def __init__(self, directory: Path, encoder: DocumentEncoder) -> None:
        self.directory = directory
        self.dtype: np.dtype[np.unsignedinteger] = np.dtype(np.uint16)
        self.num_tokens = 0
        self.num_documents = 0
        self._columns = len(encoder.columns)
        self._lengths, self._hashes, self._places, self._values = array("q"), array("Q"), array("q"), array("f")
        self._tokens: IO[bytes] = (directory / "tokens.bin").open("wb")
        self._trained = (directory / "trained.bin").open("wb") if encoder.has_mask else None
        self._weights = (directory / "weights.bin").open("wb") if encoder.has_weights else None
        self._images = (directory / IMAGE_BYTES).open("wb") if encoder.has_images else None
        self._records: list[Records] = []

    def add(self, batch: EncodedBatch) -> None:
        """Append the batch's documents."""
        if batch.ids.size and self.dtype.itemsize == 2 and batch.ids.max() >= 2**16:
            self._widen()
        self._tokens.write(batch.ids.astype(self.dtype).tobytes())
        for file, part in ((self._trained, batch.trained), (self._weights, batch.weights)):
            if file is not None and part is not None:
                file.write(part.tobytes())
        if self._images is not None and batch.images is not None:
            records = batch.images.records.copy()
            records["document"] += self.num_documents
            records["offset"] += self._images.tell()
            self._images.write(batch.images.blob.tobytes())
            self._records.append(records)
        self.num_tokens += len(batch.ids)
        self.num_documents += len(batch.lengths)
        self._lengths.frombytes(batch.lengths.tobytes())
        self._hashes.frombytes(batch.hashes.tobytes())
        self._places.frombytes(batch.places.tobytes())
        self._values.frombytes(batch.values.tobytes())

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
        for file in (self._tokens, self._trained, self._weights, self._images):
            if file is not None:
                file.close()
        if error is None:
            self._save("lengths", np.frombuffer(self._lengths, dtype=np.int64))
            self._save("hashes", np.frombuffer(self._hashes, dtype=np.uint64))
            self._save("places", np.frombuffer(self._places, dtype=np.int64).reshape(-1, 2))
            if self._columns:
                self._save("columns", np.frombuffer(self._values, dtype=np.float32).reshape(-1, self._columns))
            if self._images is not None:
                self._save("images", np.concatenate([np.zeros(0, RECORD), *self._records]))

    def _save(self, name: str, values: NDArray[Any]) -> None:
        np.save(self.directory / f"{name}.npy", values)
