"""Weights as safetensors files of bounded size with their index, held in memory one file at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from hp_core.errors import InputError, Problem

INDEX = "model.safetensors.index.json"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def as_bytes(text: str) -> int:
    """The number of bytes that `5GB`, `500MB` or `2GiB` say.

    Raises:
        InputError: it is no such size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = match and _UNITS.get(match.group(2).upper())
    size = int(float(match.group(1)) * unit) if match and unit else 0
    if size < 1:
        raise InputError(Problem(f"--max-shard-size: {text!r} is no size", hint="write one such as 5GB or 500MB"))
    return size


class ShardWriter:
    """Writes tensors that come one after another in a known order into `model-0000i-of-0000n.safetensors`."""

    def __init__(self, directory: Path, outputs: Sequence[Mapping[str, torch.Tensor]], max_bytes: int) -> None:
        """`outputs` are all tensors in the order in which they will come, on the meta device."""
        self.directory = directory
        self._plan = _planned(outputs, max_bytes)
        self._held: dict[str, torch.Tensor] = {}
        self._index = 0
        flat = [tensor for one in outputs for tensor in one.values()]
        self.num_bytes = sum(map(_size, flat))
        self._num_parameters = sum(tensor.numel() for tensor in flat)

    @property
    def num_files(self) -> int:
        """How many files there will be."""
        return len(self._plan)

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take some tensors, and write each file as soon as it is complete."""
        self._held.update(tensors)
        while self._index < len(self._plan) and self._plan[self._index].keys() <= self._held.keys():
            names = self._plan[self._index]
            path = self._path(self._index)
            save_file({name: self._held.pop(name) for name in names}, path, metadata={"format": "pt"})
            # The library lets nobody but the owner read.
            path.chmod(self.directory.stat().st_mode & 0o666)
            # A view would keep all of the tensor that it is a part of, beyond its own file.
            self._held = {name: value.clone() if _is_part(value) else value for name, value in self._held.items()}
            self._index += 1

    def finish(self) -> None:
        """Write the index, where there are several files."""
        assert self._index == len(self._plan)
        if self.num_files > 1:
            files = {name: self._path(index).name for index, names in enumerate(self._plan) for name in names}
            metadata = {"total_parameters": self._num_parameters, "total_size": self.num_bytes}
            text = json.dumps({"metadata": metadata, "weight_map": files}, indent=2, sort_keys=True)
            (self.directory / INDEX).write_text(text + "\n", encoding="utf-8")

    def _path(self, index: int) -> Path:
        number = f"-{index + 1:05d}-of-{self.num_files:05d}" if self.num_files > 1 else ""
        return self.directory / f"model{number}.safetensors"


def _planned(outputs: Iterable[Mapping[str, torch.Tensor]], max_bytes: int) -> list[dict[str, int]]:
    """The names and sizes in each file; a tensor that is larger than a file may be has one of its own."""
    files: list[dict[str, int]] = [{}]
    total = 0
    for tensors in outputs:
        for name, tensor in tensors.items():
            size = _size(tensor)
            if files[-1] and total + size > max_bytes:
                files.append({})
                total = 0
            files[-1][name] = size
            total += size
    return files


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_part(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > _size(tensor)
