"""The bytes that a forward pass leaves behind for its backward pass, on the device and on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from hp_core.model.activation_swap import swap_of


@dataclass(frozen=True)
class SavedBytes:
    """What a forward pass keeps: bytes on the `device`, and bytes that swapping holds on the `host`."""

    device: int
    host: int = 0


def saved_bytes(model: nn.Module, forward: Callable[[], Any]) -> tuple[SavedBytes, Any]:
    """What `forward` keeps, and what it returns, which holds the graph.

    Counted is every storage that an operator made and that is alive at the end, once, whoever holds it: autograd, the
    results that selective checkpointing keeps, or what is returned. Inputs are not, nor the model's parameters, FSDP2's
    gathered ones among them. Have `forward` return a scalar, and take the count before its backward pass. What a
    compiled module keeps inside is not seen.

    Args:
        model: whose parameters and swapped modules these are.
        forward: runs a part of the model, or all of it.
    """
    made = _Made()
    swap = swap_of(model)
    before = 0 if swap is None else swap.host_bytes
    with made:
        found = forward()
    own = {one._cdata for tensor in model.parameters() for one in _storages(tensor)}
    alive = [one for one in made.alive() if one._cdata not in own]
    host = 0 if swap is None else swap.host_bytes - before
    if swap is None:
        return SavedBytes(sum(one.nbytes() for one in alive)), found
    device = sum(one.nbytes() for one in alive if one.device == swap.transfer.device)
    # Where the device is the host, its buffers are among what is alive.
    return SavedBytes(device - host if swap.transfer.is_at_once else device, host), found


class _Made(TorchDispatchMode):
    """Remembers, without keeping them, the storages of all that operators give."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._references: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {one._cdata for given in tree_leaves((args, kwargs)) for one in _storages(given)}
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            for storage in _storages(one):
                if storage._cdata not in known and storage._cdata not in self._references:
                    self._references[storage._cdata] = StorageWeakRef(storage)
        return found

    def alive(self) -> Iterator[torch.UntypedStorage]:
        """Those that something keeps."""
        for reference in self._references.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                yield storage


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """A storage, that of a tensor, or those of what it is made of; none of anything else."""
    if isinstance(value, torch.UntypedStorage):
        yield value
    elif not isinstance(value, torch.Tensor):
        return
    elif is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        for name in names:
            yield from _storages(getattr(value, name))
    elif value.layout == torch.strided:
        yield value.untyped_storage()
