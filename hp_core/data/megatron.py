"""Token files of Megatron-LM (`NAME.bin` with `NAME.idx`), memory-mapped as they are."""

from __future__ import annotations

import glob
import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_core.data.cache import build_once
from hp_core.data.fingerprint import document_hash, file_fingerprint, fingerprint
from hp_core.data.images.table import ImageTable
from hp_core.data.protocols import Tokenizer
from hp_core.data.records import Place
from hp_core.errors import ArgumentError, InputError

_MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_VERSION = 1
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_FLOATS = {6: "float64", 7: "float32"}
_SCANNED_TOKENS = 1 << 22
_RULE_VERSION = 1


@dataclass(frozen=True, eq=False)
class MegatronIndex:
    """What an `.idx` file says: the ids' type, and the tokens in each document, `[documents]`."""

    path: Path
    dtype: np.dtype[np.integer[Any]]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, path: Path) -> MegatronIndex:
        """Read the index of the `.bin` file at `path`, and compare both files' sizes with it.

        Raises `InputError` for a file that is missing, cut short or too long, of another format or version, with ids
        that aren't whole numbers, with the modes of a multimodal set, or with sequences that don't follow one another.
        """
        index = path.with_suffix(".idx")
        try:
            content, size = index.read_bytes(), path.stat().st_size
        except OSError as error:
            raise InputError(f"{error.filename}: {error.strerror}; tokens of Megatron are two files") from error
        dtype, num_sequences, num_bounds = _header(index, content)
        parts = (("int32", num_sequences), ("int64", num_sequences), ("int64", num_bounds))
        arrays, offset = [], _HEADER.size
        expected = offset + 12 * num_sequences + 8 * num_bounds
        if len(content) == expected + num_sequences and num_sequences:
            raise InputError(
                f"{index}: holds a mode for each sequence, as a multimodal set does; only text can be read"
            )
        if len(content) != expected:
            what = f"{num_sequences} sequences and {num_bounds} document bounds take {expected} bytes"
            raise InputError(f"{index}: the file has {len(content)} bytes, and its {what}")
        for name, count in parts:
            arrays.append(np.frombuffer(content, np.dtype(name).newbyteorder("<"), count, offset).astype(np.int64))
            offset += arrays[-1].size * np.dtype(name).itemsize
        sequences, pointers, bounds = arrays
        _check_sequences(index, sequences, pointers, dtype.itemsize)
        _check_bounds(index, bounds, num_sequences)
        tokens = int(sequences.sum())
        if size != tokens * dtype.itemsize:
            what = f"the {tokens} tokens of type {dtype.name} in {index.name} take {tokens * dtype.itemsize}"
            raise InputError(f"{path}: the file has {size} bytes, and {what}")
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sequences)])
        return cls(path, dtype, np.diff(ends[bounds]))

    @property
    def tokens(self) -> NDArray[np.integer[Any]]:
        """The ids of all documents end to end, mapped from disk."""
        count = int(self.lengths.sum())
        return np.memmap(self.path, self.dtype, "r", shape=(count,)) if count else np.zeros(0, self.dtype)


def _header(index: Path, content: bytes) -> tuple[np.dtype[np.integer[Any]], int, int]:
    """The ids' type, and the numbers of sequences and of document bounds."""
    if content.startswith(_OLD_MAGIC):
        raise InputError(f"{index}: the format before Megatron's memory-mapped one; convert it with Megatron's tools")
    if not content.startswith(_MAGIC):
        raise InputError(
            f"{index}: not an index of Megatron: it begins with {content[: len(_MAGIC)]!r}, not {_MAGIC!r}"
        )
    if len(content) < _HEADER.size:
        raise InputError(f"{index}: the file has {len(content)} bytes, and its header takes {_HEADER.size}")
    _, version, code, num_sequences, num_bounds = _HEADER.unpack_from(content)
    if version != _VERSION:
        raise InputError(f"{index}: version {version} of the format; only version {_VERSION} can be read")
    if code not in _DTYPES:
        kind = f"{_FLOATS[code]} numbers, which are no ids" if code in _FLOATS else f"the unknown type {code}"
        raise InputError(f"{index}: the tokens are of {kind}")
    return np.dtype(_DTYPES[code]).newbyteorder("<"), num_sequences, num_bounds


def _check_sequences(index: Path, lengths: NDArray[np.int64], pointers: NDArray[np.int64], itemsize: int) -> None:
    if lengths.size and lengths.min() < 0:
        raise InputError(f"{index}: sequence {int(lengths.argmin())} has {lengths.min()} tokens")
    expected = (np.cumsum(lengths) - lengths) * itemsize
    wrong = np.flatnonzero(pointers != expected)
    if wrong.size:
        first = int(wrong[0])
        begins = f"sequence {first} begins at byte {pointers[first]}"
        raise InputError(f"{index}: {begins}, and the sequences before it end at byte {expected[first]}")


def _check_bounds(index: Path, bounds: NDArray[np.int64], num_sequences: int) -> None:
    if not bounds.size or bounds[0] != 0 or bounds[-1] != num_sequences or np.any(np.diff(bounds) < 0):
        ends = f"from {bounds[0]} to {bounds[-1]}" if bounds.size else "none"
        raise InputError(
            f"{index}: the bounds of its documents must rise from 0 to {num_sequences}, its number of sequences;"
            f" they go {ends}"
        )


class JoinedTokens:
    """Several arrays of ids as if they lay end to end, without a copy of them."""

    def __init__(self, parts: Sequence[NDArray[np.integer[Any]]]) -> None:
        self._parts = [part for part in parts if part.size]
        self._ends = np.cumsum([part.size for part in self._parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._parts else 0

    def __getitem__(self, where: NDArray[np.int64] | slice, /) -> NDArray[np.integer[Any]]:
        """The ids at some positions, each from 0 to below the length, or in a slice without a step."""
        positions = np.arange(*where.indices(len(self))) if isinstance(where, slice) else np.asarray(where)
        found = np.zeros(positions.shape, dtype=np.int64)
        numbers = np.searchsorted(self._ends, positions, side="right")
        for number in np.unique(numbers):
            part, inside = self._parts[number], numbers == number
            found[inside] = part[positions[inside] - (self._ends[number] - part.size)]
        return found


class MegatronSource:
    """Documents that are tokens already, in one or more pairs of `.bin` and `.idx` files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)

    @property
    def name(self) -> str:
        """The file, or how many there are."""
        return str(self.paths[0]) if len(self.paths) == 1 else f"{len(self.paths)} Megatron files"

    def locate(self, place: Place) -> str:
        """The file, and the document in it."""
        return f"{self.paths[place.part]}: document {place.number}"

    def store(self, tokenizer: Tokenizer, cache_dir: Path) -> MegatronStore:
        """The documents as a token store. Raises `InputError` for damaged files and ids the tokenizer doesn't have.

        The files are read through once, for the ids' range and hashes, whose results are cached until a file's size
        or time of change is another.
        """
        scans = [_scan(MegatronIndex.of(path), cache_dir) for path in self.paths]
        for scan in scans:
            if not 0 <= scan.lowest <= scan.highest < tokenizer.vocab_size:
                what = f"ids from {scan.lowest} to {scan.highest}"
                raise InputError(
                    f"{scan.index.path}: holds {what}, and the tokenizer {tokenizer.name!r} has those from 0 to"
                    f" {tokenizer.vocab_size - 1}; use the tokenizer that the file was made with"
                )
        return MegatronStore(self, scans)


@dataclass(frozen=True, eq=False)
class _Scan:
    """What one pass over a file found."""

    index: MegatronIndex
    fingerprint: str
    lowest: int
    highest: int
    hashes: NDArray[np.uint64]


class MegatronStore:
    """A token store over Megatron's own files: nothing is encoded or copied.

    Documents are used as they are: no end token is added to one that has none, and every token is a target.
    """

    columns: tuple[str, ...] = ()
    trained: None = None
    weights: None = None
    has_weights = False
    images: ImageTable | None = None
    faulty_rows = 0

    def __init__(self, source: MegatronSource, scans: Sequence[_Scan]) -> None:
        self.source = source
        self.key = fingerprint("megatron", _RULE_VERSION, *(scan.fingerprint for scan in scans))
        self.lengths = np.concatenate([scan.index.lengths for scan in scans])
        self.hashes = np.concatenate([scan.hashes for scan in scans])
        self._indexes = [scan.index for scan in scans]

    @cached_property
    def tokens(self) -> JoinedTokens | NDArray[np.integer[Any]]:
        """The ids, mapped from disk."""
        parts = [index.tokens for index in self._indexes]
        return parts[0] if len(parts) == 1 else JoinedTokens(parts)

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """Each document's file, from 0, and its number in it, from 1: `[documents, 2]`."""
        counts = [len(index.lengths) for index in self._indexes]
        numbers = [np.arange(1, count + 1) for count in counts]
        return np.stack([np.repeat(np.arange(len(counts)), counts), np.concatenate(numbers)], axis=1)

    @property
    def values(self) -> NDArray[np.float32]:
        """The documents' columns, of which there are none: `[documents, 0]`."""
        return np.zeros((len(self.lengths), 0), dtype=np.float32)

    def locate(self, document: int) -> str:
        """The document's file, and its number in it."""
        return self.source.locate(Place(*self.places[document].tolist()))

    def __getstate__(self) -> dict[str, object]:
        # Opened maps are not sent to data-loader workers, who open the files themselves.
        return {name: value for name, value in self.__dict__.items() if name != "tokens"}


def _scan(index: MegatronIndex, cache_dir: Path) -> _Scan:
    state = index.path.stat()
    names = (index.path.resolve(), index.path.with_suffix(".idx").resolve())
    index_fingerprint = file_fingerprint(names[1])
    key = fingerprint(
        "megatron scan", _RULE_VERSION, str(names[0]), state.st_size, state.st_mtime_ns, index_fingerprint
    )

    def write(directory: Path) -> None:
        hashes = np.fromiter(_hashes(index), dtype=np.uint64, count=len(index.lengths))
        np.save(directory / "hashes.npy", hashes)
        lowest, highest, digest = _range_and_digest(index)
        found = {"lowest": lowest, "highest": highest, "fingerprint": fingerprint(index_fingerprint, digest)}
        (directory / "scan.json").write_text(json.dumps(found) + "\n", encoding="utf-8")

    def is_complete(directory: Path) -> bool:
        try:
            return len(np.load(directory / "hashes.npy")) == len(index.lengths) and len(_read(directory)) == 3
        except (OSError, ValueError):
            return False

    directory = build_once(cache_dir, key, write, is_complete=is_complete)
    found = _read(directory)
    hashes = np.load(directory / "hashes.npy")
    return _Scan(index, str(found["fingerprint"]), int(found["lowest"]), int(found["highest"]), hashes)


def _read(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "scan.json").read_text(encoding="utf-8"))
    return found


def _hashes(index: MegatronIndex) -> Any:
    tokens, start = index.tokens, 0
    for length in index.lengths.tolist():
        yield document_hash(tokens[start : start + length].tobytes())
        start += length


def _range_and_digest(index: MegatronIndex) -> tuple[int, int, str]:
    """The smallest and the largest id (0 and 0 where there is none), and a hash of all."""
    tokens, digest = index.tokens, hashlib.sha256()
    lowest, highest = [0], [0]
    for start in range(0, tokens.size, _SCANNED_TOKENS):
        block = np.ascontiguousarray(tokens[start : start + _SCANNED_TOKENS])
        digest.update(block.data)
        lowest.append(int(block.min()))
        highest.append(int(block.max()))
    return min(lowest), max(highest), digest.hexdigest()[:32]


def expand_megatron(files: str | Sequence[str], *, argument: str = "megatron") -> list[Path]:
    """The `.bin` files that entries stand for: a path without its ending, with `.bin` or `.idx`, or a glob of `.bin`.

    Entries keep their order; what a glob stands for is sorted. Raises `ArgumentError` for an entry that stands for
    nothing, a directory, a compressed file and a file named twice.
    """
    entries = [files] if isinstance(files, str) else list(files)
    if not entries:
        raise ArgumentError(argument, "the list of files is empty")
    named_by: dict[Path, str] = {}
    expanded: list[Path] = []
    for number, entry in enumerate(entries):
        place = argument if isinstance(files, str) else f"{argument}[{number}]"
        for path in _expand(entry, place):
            if (identity := path.resolve()) in named_by:
                raise ArgumentError(place, f"{str(path)!r} is named twice, by {named_by[identity]!r} and {entry!r}")
            named_by[identity] = entry
            expanded.append(path)
    return expanded


def _expand(entry: str, argument: str) -> list[Path]:
    path = Path(entry).expanduser()
    if ".bin." in path.name or ".idx." in path.name:
        raise ArgumentError(argument, f"{entry!r} is compressed, and tokens are mapped from disk", "decompress it")
    if path.is_dir():
        raise ArgumentError(argument, f"{entry!r} is a directory", f"write a glob: {entry.rstrip('/')}/*.bin")
    named = path.with_name(path.name if path.suffix in (".bin", ".idx") else path.name + ".bin")
    if (named := named.with_suffix(".bin")).exists() or named.with_suffix(".idx").exists():
        return [named]
    if glob.has_magic(entry):
        found = sorted({Path(match) for match in glob.glob(str(path), recursive=True) if match.endswith(".bin")})
        if not found:
            raise ArgumentError(argument, f"no .bin file matches {entry!r}")
        return found
    raise ArgumentError(argument, f"there is no file {str(named)!r}", "name the path without .bin and .idx")
