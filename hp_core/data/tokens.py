"""Documents as token ids on disk: encoded once, memory-mapped ever after."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hp_core.data.cache import build_once
from hp_core.data.fingerprint import document_hash, fingerprint
from hp_core.data.protocols import Tokenizer
from hp_core.data.sources import Document, Source
from hp_core.errors import InputError

_FORMAT = 1
_BATCH_DOCUMENTS = 1000
_BATCH_CHARACTERS = 4_000_000
_log = logging.getLogger(__name__)


class TokenStore:
    """The ids of all documents end to end, and each document's length (0 if it has no text), split hash and columns.

    Opened when first used and never pickled, so it costs a data-loader worker nothing to be sent.
    """

    def __init__(self, directory: Path, columns: Sequence[str] = ()) -> None:
        self.directory = directory
        self.key = directory.name
        self.columns = tuple(columns)

    @cached_property
    def tokens(self) -> NDArray[np.unsignedinteger]:
        """The ids, mapped from disk."""
        dtype, count, _ = _read_meta(self.directory)
        if count == 0:
            return np.zeros(0, dtype)
        return np.memmap(self.directory / "tokens.bin", dtype=dtype, mode="r", shape=(count,))

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens in each document, EOS included."""
        loaded: NDArray[np.int64] = np.load(self.directory / "lengths.npy")
        return loaded

    @cached_property
    def hashes(self) -> NDArray[np.uint64]:
        """What a validation split goes by: the hash of each document's group, or of its text."""
        loaded: NDArray[np.uint64] = np.load(self.directory / "hashes.npy")
        return loaded

    @cached_property
    def values(self) -> NDArray[np.float32]:
        """Each document's columns, `[documents, columns]`."""
        loaded: NDArray[np.float32] = np.load(self.directory / "columns.npy")
        return loaded

    def __getstate__(self) -> dict[str, object]:
        return {"directory": self.directory, "key": self.key, "columns": self.columns}


def build_tokens(source: Source, tokenizer: Tokenizer, cache_dir: Path, columns: Sequence[str] = ()) -> TokenStore:
    """The source's documents as ids, with their `columns`, from the cache if they are there.

    A document is what the tokenizer makes of its text, then EOS unless it ends with one. Raises `InputError`
    for text that isn't valid Unicode, and for a tokenizer that gives ids it doesn't declare.
    """
    named = ("columns", *columns) if columns else ()
    key = fingerprint("tokens", _FORMAT, source.fingerprint, tokenizer.fingerprint, *named)

    def write(directory: Path) -> None:
        _log.info("encoding %s with tokenizer %s", source.name, tokenizer.name)
        _write(source.documents(), tokenizer, directory, tuple(columns))

    def is_complete(directory: Path) -> bool:
        return _is_complete(directory, len(columns))

    return TokenStore(build_once(cache_dir, key, write, is_complete=is_complete), columns)


def document_bytes(document: Document) -> bytes:
    """The document's text as UTF-8. Raises `InputError` for half a surrogate pair, which JSON can smuggle in."""
    try:
        return document.text.encode()
    except UnicodeEncodeError as error:
        character = document.text[error.start]
        raise InputError(
            f"{document.location}: character {error.start + 1} of the text is {character!a}, half of a surrogate pair"
        ) from error


def split_hash(document: Document) -> int:
    """What a validation split goes by. Raises `InputError` as `document_bytes` does."""
    content = document_bytes(document)
    return document_hash(document.group.encode() if document.group else content)


def _write(documents: Iterable[Document], tokenizer: Tokenizer, directory: Path, columns: tuple[str, ...] = ()) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    lengths, hashes, values = array("q"), array("Q"), array("f")
    with (directory / "tokens.bin").open("wb") as file:
        for batch in _batches(documents):
            hashes.extend(split_hash(document) for document in batch)
            for document in batch:
                if len(document.values) != len(columns):
                    raise ValueError(f"{document.location}: {len(document.values)} values for the columns {columns}")
                values.extend(document.values)
            ids = _encode([document.text for document in batch], tokenizer)
            lengths.extend(map(len, ids))
            flat = np.fromiter(chain.from_iterable(ids), dtype=np.int64, count=sum(map(len, ids)))
            if flat.size and not 0 <= flat.min() <= flat.max() < tokenizer.vocab_size:
                raise InputError(
                    f"tokenizer {tokenizer.name!r} gave ids from {flat.min()} to {flat.max()},"
                    f" outside its vocab_size {tokenizer.vocab_size}"
                )
            flat.astype(dtype).tofile(file)
    np.save(directory / "lengths.npy", np.frombuffer(lengths, dtype=np.int64))
    np.save(directory / "hashes.npy", np.frombuffer(hashes, dtype=np.uint64))
    if columns:
        np.save(directory / "columns.npy", np.frombuffer(values, dtype=np.float32).reshape(-1, len(columns)))
    meta = {
        "format": _FORMAT,
        "dtype": dtype.name,
        "tokens": sum(lengths),
        "documents": len(lengths),
        "tokenizer": tokenizer.name,
        **({"columns": columns} if columns else {}),
    }
    (directory / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")


def _encode(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Ids with EOS for every text, and none for an empty one."""
    encoded = iter(tokenizer.encode_batch([text for text in texts if text]))
    documents: list[list[int]] = []
    for text in texts:
        ids = next(encoded) if text else []
        if text and (not ids or ids[-1] != tokenizer.eos_id):
            ids = [*ids, tokenizer.eos_id]
        documents.append(ids)
    return documents


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Batches that are large enough to encode in parallel and bounded in memory, however long documents are."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _read_meta(directory: Path) -> tuple[np.dtype[np.unsignedinteger], int, int]:
    meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
    return np.dtype(meta["dtype"]), int(meta["tokens"]), int(meta["documents"])


def _is_complete(directory: Path, num_columns: int) -> bool:
    """Whether the files have the sizes that were written; a disk that lost a part is found before training."""
    try:
        dtype, tokens, documents = _read_meta(directory)
        shapes: dict[str, tuple[int, ...]] = {"lengths.npy": (documents,), "hashes.npy": (documents,)}
        if num_columns:
            shapes["columns.npy"] = (documents, num_columns)
        return (directory / "tokens.bin").stat().st_size == tokens * dtype.itemsize and all(
            np.load(directory / path, mmap_mode="r").shape == shape for path, shape in shapes.items()
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return False
