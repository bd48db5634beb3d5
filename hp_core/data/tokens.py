"""Documents as token ids on disk: encoded once, memory-mapped ever after."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hp_core.data.cache import build_once
from hp_core.data.fingerprint import fingerprint
from hp_core.data.images.table import ImageTable
from hp_core.data.parallel import encoded_batches
from hp_core.data.reading import Faults, Reading
from hp_core.data.records import DocumentEncoder, Place, Source
from hp_core.data.writing import IMAGE_BYTES, StoreWriter

FORMAT = 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Meta:
    """What a store says of itself: sizes, types, which files there are, and the rows that were left out."""

    dtype: str
    tokens: int
    documents: int
    columns: tuple[str, ...]
    has_mask: bool
    has_weights: bool
    faulty_rows: int
    faults: tuple[str, ...]
    has_images: bool = False

    def write(self, directory: Path) -> None:
        """Into the store's directory."""
        content = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        (directory / "meta.json").write_text(content + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Meta:
        """From the store's directory. Raises `OSError`, `ValueError`, `KeyError` or `TypeError` if it is damaged."""
        held = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
        held.pop("format")
        return cls(**{**held, "columns": tuple(held["columns"]), "faults": tuple(held["faults"])})


class TokenStore:
    """The ids of all documents end to end, and what is known of each document.

    Opened when first used and never pickled, so it costs a data-loader worker nothing to be sent.
    """

    def __init__(self, directory: Path, source: Source | None = None, key: str | None = None) -> None:
        self.directory = directory
        self.key = directory.name if key is None else key
        self._source = source

    @cached_property
    def meta(self) -> Meta:
        """What the store says of itself."""
        return Meta.read(self.directory)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the documents' numbers."""
        return self.meta.columns

    @property
    def has_weights(self) -> bool:
        """Whether some documents have weights."""
        return self.meta.has_weights

    @property
    def faulty_rows(self) -> int:
        """How many rows of the source were left out because they are faulty."""
        return self.meta.faulty_rows

    @cached_property
    def tokens(self) -> NDArray[np.unsignedinteger]:
        """The ids, mapped from disk."""
        return self._by_token("tokens.bin", self.meta.dtype)

    @cached_property
    def trained(self) -> NDArray[np.bool_] | None:
        """Whether each token is a target, mapped from disk; None where all are."""
        return self._by_token("trained.bin", np.bool_) if self.meta.has_mask else None

    @cached_property
    def weights(self) -> NDArray[np.float32] | None:
        """What each token counts for as a target, mapped from disk; None where all count for 1."""
        return self._by_token("weights.bin", np.float32) if self.meta.has_weights else None

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens in each document, the end token included; 0 for one without text."""
        return self._by_document("lengths.npy")

    @cached_property
    def hashes(self) -> NDArray[np.uint64]:
        """What a validation split goes by: the hash of each document's group, or of its content."""
        return self._by_document("hashes.npy")

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """Where each document stands in its source, `[documents, 2]`: see `Place`."""
        return self._by_document("places.npy")

    @cached_property
    def values(self) -> NDArray[np.float32]:
        """Each document's columns, `[documents, columns]`."""
        return self._by_document("columns.npy")

    @cached_property
    def images(self) -> ImageTable | None:
        """The images of the documents, their bytes mapped from disk; None where there can be none."""
        return _images(self.directory) if self.meta.has_images else None

    def locate(self, document: int) -> str:
        """Where a document stands, such as `data/a.jsonl:12`; empty in another process than that which built it."""
        return "" if self._source is None else self._source.locate(Place(*self.places[document].tolist()))

    def _by_token(self, name: str, dtype: DTypeLike) -> NDArray[Any]:
        if self.meta.tokens == 0:
            return np.zeros(0, dtype)
        return np.memmap(self.directory / name, dtype=dtype, mode="r", shape=(self.meta.tokens,))

    def _by_document(self, name: str) -> NDArray[Any]:
        loaded: NDArray[Any] = np.load(self.directory / name)
        return loaded

    def __getstate__(self) -> dict[str, object]:
        return {"directory": self.directory, "key": self.key, "_source": None}


def build_tokens(source: Source, encoder: DocumentEncoder, reading: Reading) -> TokenStore:
    """The source's rows as documents of tokens, from the cache if they are there.

    Raises `InputError` with the first faulty rows if there are more than `reading` lets be left out, whether they
    are found now or were when the cache was filled.
    """
    key = fingerprint("tokens", FORMAT, source.fingerprint, encoder.fingerprint)

    def write(directory: Path) -> None:
        _log.info("encoding %s", source.name)
        _write(source, encoder, reading, directory)

    name = fingerprint("in", encoder.location, key) if encoder.location else key
    directory = build_once(reading.cache_dir, name, write, is_complete=lambda path: _is_complete(path, encoder))
    store = TokenStore(directory, source, key)
    Faults(source.name, store.meta.faults, store.meta.faulty_rows).require(reading)
    return store


def _write(source: Source, encoder: DocumentEncoder, reading: Reading, directory: Path) -> None:
    faults = Faults(source.name)
    with StoreWriter(directory, encoder) as writer:
        for batch in encoded_batches(source, encoder, reading.num_processes):
            writer.add(batch)
            for fault in batch.faults:
                faults.add(fault)
            # After the whole batch, so that one message tells all of its faults.
            faults.require(reading)
    faults.log()
    meta = Meta(
        dtype=writer.dtype.name,
        tokens=writer.num_tokens,
        documents=writer.num_documents,
        columns=encoder.columns,
        has_mask=encoder.has_mask,
        has_weights=encoder.has_weights,
        has_images=encoder.has_images,
        faulty_rows=faults.count,
        faults=tuple(faults.messages),
    )
    meta.write(directory)


def _images(directory: Path) -> ImageTable:
    records, path = np.load(directory / "images.npy"), directory / IMAGE_BYTES
    blob = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.zeros(0, dtype=np.uint8)
    if len(records) and int((records["offset"] + records["length"]).max()) != len(blob):
        raise ValueError(f"{path} is not complete")
    return ImageTable(records, blob)


def _is_complete(directory: Path, encoder: DocumentEncoder) -> bool:
    """Whether the files have the sizes that were written; a disk that lost a part is found before training."""
    try:
        meta = Meta.read(directory)
        shapes: dict[str, tuple[int, ...]] = {"lengths.npy": (meta.documents,), "hashes.npy": (meta.documents,)}
        shapes["places.npy"] = (meta.documents, 2)
        if encoder.columns:
            shapes["columns.npy"] = (meta.documents, len(encoder.columns))
        sizes = {"tokens.bin": np.dtype(meta.dtype).itemsize}
        if encoder.has_mask:
            sizes["trained.bin"] = 1
        if encoder.has_weights:
            sizes["weights.bin"] = 4
        if encoder.has_images and not _images(directory).is_unchanged():
            return False
        return all(
            (directory / name).stat().st_size == meta.tokens * itemsize for name, itemsize in sizes.items()
        ) and all(np.load(directory / name, mmap_mode="r").shape == shape for name, shape in shapes.items())
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return False
