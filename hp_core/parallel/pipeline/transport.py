"""Tensors that travel between the ranks of a pipeline outside of torch's schedules."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
_MOST_DIMENSIONS = 6


class Transport:
    """Sends to and receives from the other ranks of `group`, whatever the shapes."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._on_the_way: list[tuple[dist.Work | None, torch.Tensor]] = []
        self._here: dict[int, torch.Tensor] = {}

    def send(self, stage: int, tensor: torch.Tensor, rank: int | None) -> None:
        """Let `stage` have the tensor, without waiting for it; `rank` holds it, this one if None."""
        if rank is None:
            self._here[stage] = tensor
            return
        for one in (self._header(tensor), tensor.detach().contiguous())[: 1 + bool(tensor.numel())]:
            self._on_the_way.append((dist.isend(one, group=self._group, group_dst=rank), one))

    def receive(self, stage: int, rank: int | None) -> torch.Tensor:
        """What was sent to this rank's `stage` from `rank`."""
        if rank is None:
            return self._here.pop(stage)
        header = torch.empty(_MOST_DIMENSIONS + 2, dtype=torch.int64, device=self._device)
        dist.recv(header, group=self._group, group_src=rank)
        tensor = self._empty(header)
        if tensor.numel():
            dist.recv(tensor, group=self._group, group_src=rank)
        return tensor

    def finish(self) -> None:
        """Wait until everything has arrived."""
        for work, _ in self._on_the_way:
            if work is not None:
                work.wait()
        self._on_the_way.clear()

    def broadcast(self, tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
        """The tensors that `rank` gives, on all ranks of the group."""
        is_source = self._group.rank() == rank
        names: list[list[str]] = [list(tensors)]
        dist.broadcast_object_list(names, group=self._group, group_src=rank)
        found = {}
        for name in names[0]:
            header = self._header(tensors[name]) if is_source else torch.empty(_MOST_DIMENSIONS + 2, dtype=torch.int64)
            header = header.to(self._device)
            dist.broadcast(header, group=self._group, group_src=rank)
            tensor = tensors[name].detach().contiguous() if is_source else self._empty(header)
            dist.broadcast(tensor, group=self._group, group_src=rank)
            found[name] = tensor
        return found

    def collect(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of all ranks of the group, on the host of its first; nothing on the others."""
        if self._group.rank() > 0:
            dist.send_object_list([list(tensors)], group=self._group, group_dst=0)
            for tensor in tensors.values():
                self.send(0, tensor.to(self._device), 0)
            self.finish()
            return {}
        for rank in range(1, self._group.size()):
            names: list[list[str]] = [[]]
            dist.recv_object_list(names, group=self._group, group_src=rank)
            tensors = {**tensors, **{name: self.receive(0, rank).cpu() for name in names[0]}}
        return tensors

    def add_of(self, tensor: torch.Tensor, rank: int) -> None:
        """Add the same tensor of another rank, which calls it, too; both have the same bits afterwards."""
        own, other = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if not own.numel():
            return
        # Both at once: alone, each end's send could wait for the other's.
        operations = [
            dist.P2POp(dist.isend, own, group=self._group, group_peer=rank),
            dist.P2POp(dist.irecv, other, group=self._group, group_peer=rank),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        tensor.add_(other)

    def _header(self, tensor: torch.Tensor) -> torch.Tensor:
        sizes = [*tensor.shape, *[0] * (_MOST_DIMENSIONS - tensor.ndim)]
        return torch.tensor([_DTYPES.index(tensor.dtype), tensor.ndim, *sizes], device=self._device)

    def _empty(self, header: torch.Tensor) -> torch.Tensor:
        dtype, ndim, *sizes = header.tolist()
        return torch.empty(sizes[:ndim], dtype=_DTYPES[dtype], device=self._device)
