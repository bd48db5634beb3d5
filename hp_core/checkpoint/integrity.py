"""What each file of a checkpoint was when it was written: noted while writing, and compared before loading."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from hp_core.checkpoint.layout import FILES, Checkpoint, incomplete, own_file, read_json
from hp_core.errors import InputError

_CHUNK = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """A file's size in bytes and its hash, XXH3 of 128 bits: it finds damage and mix-ups, not malice."""

    size: int
    xxh3: str


class HashingFile:
    """A file that is written from start to end, and hashed on the way: reading it again would take longer."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._hash = xxhash.xxh3_128()
        self._size = 0
        # Why writing failed, which torch's archives replace by an error of their own.
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write bytes, or whatever has a buffer."""
        try:
            number = self._raw.write(data)
        except OSError as error:
            self.failure = error
            raise
        self._hash.update(data)
        self._size += number
        return number

    def tell(self) -> int:
        """The number of bytes written."""
        return self._size

    def flush(self) -> None:
        """Hand on to the operating system what it doesn't have yet."""
        self._raw.flush()

    def fileno(self) -> int:
        """The file's descriptor, for `os.fsync`."""
        return self._raw.fileno()

    def close(self) -> None:
        """Close the file."""
        self._raw.close()

    @property
    def record(self) -> FileRecord:
        """What was written."""
        return FileRecord(self._size, self._hash.hexdigest())


def write_file(path: Path, data: bytes) -> FileRecord:
    """Write a file so that it is on the disk when this returns."""
    with path.open("wb") as raw:
        file = HashingFile(raw)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return file.record


def listed(files: Mapping[str, FileRecord]) -> bytes:
    """The text of a checkpoint's list of files."""
    named = {name: asdict(record) for name, record in sorted(files.items())}
    return json.dumps({"hash": "xxh3_128", "files": named}, indent=2).encode()


def records_of(checkpoint: Checkpoint) -> dict[str, FileRecord]:
    """What a checkpoint says of its files.

    Raises:
        InputError: the list is not there, or can't be read.
    """
    if not (checkpoint.path / FILES).exists():
        raise InputError(incomplete(checkpoint.path))
    value = read_json(checkpoint.path, FILES)
    try:
        records = {str(name): FileRecord(int(one["size"]), str(one["xxh3"])) for name, one in value["files"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{checkpoint.path}: {FILES} is no list of files") from error
    return records


def problem_of(directory: Path, name: str, record: FileRecord) -> str | None:
    """What is wrong with a file; None when it is as it was written."""
    try:
        path = own_file(directory, name)
        size = path.stat().st_size
        if size != record.size:
            return f"{name} has {size:,} of {record.size:,} bytes"
        found = hash_of(path)
    except InputError as error:
        return str(error)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} can't be read: {error.strerror}"
    return None if found == record.xxh3 else f"{name} is not what was written: another hash"


def hash_of(path: Path) -> str:
    """The hash of a file."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while number := file.readinto(buffer):
            digest.update(buffer[:number])
    return digest.hexdigest()


def shares(records: Mapping[str, FileRecord], num_ranks: int) -> list[list[str]]:
    """The files that each rank hashes: about as many bytes for all."""
    names: list[list[str]] = [[] for _ in range(num_ranks)]
    sizes = [0] * num_ranks
    for name in sorted(records, key=lambda one: (-records[one].size, one)):
        rank = sizes.index(min(sizes))
        names[rank].append(name)
        sizes[rank] += records[name].size
    return names


def problems_of(directory: Path, records: Mapping[str, FileRecord], names: Sequence[str]) -> list[str]:
    """What is wrong with some of a checkpoint's files."""
    found = (problem_of(directory, name, records[name]) for name in names)
    return [problem for problem in found if problem is not None]
