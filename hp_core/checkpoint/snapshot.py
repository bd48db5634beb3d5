"""A rank's tensors as they are now: where each belongs in the whole, and copies that training doesn't change."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hp_core.errors import RunError


class Copies:
    """Memory of the host for copies, kept from save to save: the pages of fresh memory cost more than the copying."""

    def __init__(self) -> None:
        self._buffers: dict[MetadataIndex, torch.Tensor] = {}

    def take(self, tensors: dict[MetadataIndex, torch.Tensor]) -> dict[MetadataIndex, torch.Tensor]:
        """Copy tensors; the copies of the call before are written over."""
        for index in set(self._buffers) - set(tensors):
            del self._buffers[index]
        is_on_device = False
        for index, tensor in tensors.items():
            buffer = self._buffers.get(index)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._buffers[index] = buffer
            buffer.copy_(tensor, non_blocking=tensor.is_cuda)
            is_on_device |= tensor.is_cuda
        if is_on_device:
            torch.cuda.current_stream().synchronize()
        return dict(self._buffers)


class SavePlanner(DefaultSavePlanner):
    """Plans a save of the tensors as they lie on the ranks when it is made.

    Args:
        tensors: a rank's tensors by name.
        copies: where to copy them; without it they must not change until they are written.

    Raises:
        RunError: a tensor can't be told apart from another layout's, see `require_one_piece`.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], copies: Copies | None) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            require_one_piece(name, tensor)
        super().set_up_planner(dict(tensors))
        self._own = super().create_local_plan()
        resolve = super().resolve_data
        found = {item.index: cast(torch.Tensor, resolve(item)) for item in self._own.items}
        self._data = found if copies is None else copies.take(found)
        self.state_dict = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Only learn which rank this is; the state is that of the call."""
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """What this rank has to write."""
        return self._own

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The tensor of an item."""
        return self._data[write_item.index]


def require_one_piece(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose part on this rank is not one piece of the whole.

    torch's checkpoints note where a part begins and how large it is. Where two meshes share a dimension, FSDP2 calls
    its placement strided, and parts are single pieces all the same if each of the tensor-parallel parts is cut again.
    The packed projections of some tensor-parallel plans are not: they would be loaded into another layout in a wrong
    order, and nobody would notice.

    Raises:
        RunError: names the tensor.
    """
    if not isinstance(tensor, DTensor) or not any(isinstance(one, _StridedShard) for one in tensor.placements):
        return
    rows = _own_rows(tensor)
    for dim, own in rows.items():
        if len(own) > 1 and not torch.equal(own, torch.arange(int(own[0]), int(own[0]) + len(own))):
            raise RunError(
                f"{name}: this rank's part along dimension {dim} is not one piece of the whole "
                f"({tensor.placements}), so a checkpoint of it can't be loaded into another layout"
            )


def _own_rows(tensor: DTensor) -> dict[int, torch.Tensor]:
    """The numbers of the whole's rows that this rank has, in the order that it has them, by dimension."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    rows: dict[int, torch.Tensor] = {}
    for axis, placement in enumerate(tensor.placements):
        if not isinstance(placement, (Shard, _StridedShard)):
            continue
        alone = (
            _StridedShard(0, split_factor=placement.split_factor) if isinstance(placement, _StridedShard) else Shard(0)
        )
        whole = rows.get(placement.dim, torch.arange(tensor.shape[placement.dim]))
        parts, _ = alone._split_tensor(whole, tensor.device_mesh.size(axis), with_padding=False, contiguous=True)
        rows[placement.dim] = parts[coordinate[axis]]
    return rows
