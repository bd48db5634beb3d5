"""Reading one checkpoint's tensors: nothing of it is run, and nothing outside of it is read."""

from __future__ import annotations

import math
import pathlib
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata

from hp_core.checkpoint.layout import METADATA, own_file
from hp_core.errors import InputError

# What torch's list of a checkpoint's tensors is made of. It is a pickle, which could name any function to call.
_CLASSES: dict[tuple[str, str], Any] = {
    (one.__module__, one.__name__): one
    for one in (
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorStorageMetadata,
        of_torch.BytesStorageMetadata,
        of_torch.ChunkStorageMetadata,
        of_torch.TensorProperties,
        of_torch._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        pathlib.PosixPath,
        torch.Size,
        torch.serialization._get_layout,
    )
}
# Python 3.13 has moved it.
_CLASSES |= {(module, "PosixPath"): pathlib.PosixPath for module in ("pathlib", "pathlib._local")}


class _Unpickler(pickle._Unpickler):
    """The one that is written in python: it can be kept from setting attributes of classes, which outlives a load."""

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {**pickle._Unpickler.dispatch}

    def load_build(self) -> None:
        """Give an object its state, which lies above it."""
        target = self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(target, type) or callable(target):
            raise InputError("it changes a class or a function, which no checkpoint needs; nothing was run")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        try:
            return _CLASSES[module, name]
        except KeyError:
            raise InputError(f"it names {module}.{name}, which no checkpoint needs; nothing was run") from None


class Reader(dcp.FileSystemReader):
    """torch's reader for directories that may come from anyone."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The list of a checkpoint's tensors.

        Raises:
            InputError: it names anything but what such a list is made of, or files elsewhere.
        """
        return read_metadata(Path(self.path))


def read_metadata(directory: Path) -> Metadata:
    """The list of a checkpoint's tensors.

    Raises:
        InputError: it can't be read, names anything but what such a list is made of, files elsewhere or data that torch
            would unpickle, or lacks a part of a tensor.
    """
    path = own_file(directory, METADATA)
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    # Broken pickles raise whatever their bytes happen to spell.
    except Exception as error:
        raise InputError(f"{path}: can't be read: {type(error).__name__}: {error}".splitlines()[0]) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise InputError(f"{path}: is no list of tensors")
    for name, stored in metadata.state_dict_metadata.items():
        _require_whole(path, name, stored)
    for info in metadata.storage_data.values():
        own_file(directory, info.relative_path)
    if metadata.storage_meta is None:
        metadata.storage_meta = StorageMeta()
    return metadata


def problem_of_shards(directory: Path) -> str | None:
    """What is wrong with the files of a checkpoint that has no list of them; None where nothing can be seen."""
    try:
        metadata = read_metadata(directory)
        ends: dict[str, int] = {}
        for info in metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        return _too_short(directory, ends)
    except InputError as error:
        return str(error)


def _too_short(directory: Path, ends: Mapping[str, int]) -> str | None:
    for name, end in sorted(ends.items()):
        path = directory / name
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            return f"{name} is missing"
        if size < end:
            return f"{name} has {size:,} of {end:,} bytes"
    return None


def _require_whole(path: Path, name: str, stored: Any) -> None:
    if not isinstance(stored, TensorStorageMetadata):
        raise InputError(f"{path}: {name!r} is no tensor, and would be unpickled; nothing was run")
    found = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
    if found != math.prod(stored.size):
        raise InputError(f"{path}: {name!r} has {found:,} of {math.prod(stored.size):,} elements")
