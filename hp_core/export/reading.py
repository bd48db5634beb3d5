"""The model in a checkpoint of any layout, read piece by piece in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hp_core.checkpoint.reading import Reader, read_metadata
from hp_core.checkpoint.tensors import MODEL
from hp_core.errors import InputError


class StoredModel:
    """The model's tensors in a checkpoint; nothing is read before it is asked for, and nothing is kept.

    Attributes:
        tensors: name, shape and dtype of each, on the meta device.
    """

    def __init__(self, path: Path) -> None:
        """Read what there is. Raises `InputError` for a checkpoint that can't be read."""
        self.path = path
        self._reader = Reader(path)
        self._metadata = read_metadata(path)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self.tensors = {
            name.removeprefix(MODEL): torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
            for name, stored in self._metadata.state_dict_metadata.items()
            if name.startswith(MODEL) and isinstance(stored, TensorStorageMetadata)
        }

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Some of the tensors, whole.

        Raises:
            InputError: a file is missing or broken.
        """
        room = {MODEL + name: torch.empty_like(self.tensors[name], device="cpu") for name in names}
        # What `dcp.load` does, without reading the metadata of the whole checkpoint again for each piece.
        planner = DefaultLoadPlanner()
        planner.set_up_planner(room, self._metadata, is_coordinator=True)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except Exception as error:
            raise InputError(f"{self.path}: {names[0]!r} can't be read: {_first_line(error)}") from error
        return {name: room[MODEL + name] for name in names}


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
