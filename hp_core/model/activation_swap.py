"""Activation swapping: what modules keep for the backward pass waits for it in the memory of the host."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hp_core.config.memory import ActivationSwapConfig
from hp_core.errors import InputError, Problem, RunError
from hp_core.model.patterns import chosen_modules
from hp_core.model.transfer import Event, Transfer

_PATH = "activation_swap.modules"


def swap_activations(
    model: nn.Module, config: ActivationSwapConfig, device: torch.device, recomputed: Sequence[str] = ()
) -> list[str]:
    """Have modules of a model keep what they need for the backward pass on the host, in place; nothing is renamed.

    What a module keeps leaves when its forward ends, and comes back when its backward pass begins or, ahead of that,
    when that of the module which ran after it does. Parameters, buffers and what is on another device stay.

    Args:
        model: the whole model, before it is divided into pipeline stages; computed again is what is computed again.
        config: which modules.
        device: where the model will be.
        recomputed: the FQNs of the modules that are computed again.

    Returns:
        The FQNs of the modules.

    Raises:
        InputError: see `chosen_modules`; or one is inside a module that is computed again, which keeps nothing of it.
    """
    if config.mode == "off":
        return []
    chosen = chosen_modules(model, config.modules, _PATH)
    inside = [(name, one) for name, _ in chosen for one in recomputed if name.startswith(f"{one}.")]
    if inside:
        name, around = inside[0]
        message = f"{name!r} is inside {around!r}, which is computed again and keeps nothing of it"
        raise InputError(Problem(message, path=_PATH, hint=f"swap {around!r} instead"))
    swap = Swap(device)
    for name, module in chosen:
        module.forward = Swapped(module.forward, module, name, swap)
    return [name for name, _ in chosen]


def swap_of(model: nn.Module) -> Swap | None:
    """What the swapped modules of a model share; None if there are none."""
    for module in model.modules():
        forward = vars(module).get("forward")
        # What tensor and expert ranks put around a forward holds it.
        for one in (forward, *(vars(forward).values() if hasattr(forward, "__dict__") else ())):
            if isinstance(one, Swapped):
                return one.swap
    return None


class Swapped:
    """A module's forward, what it keeps for the backward pass being swapped.

    An object rather than a closure, so that a copy of the module runs its own forward.
    """

    def __init__(self, forward: Callable[..., Any], module: nn.Module, name: str, swap: Swap) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self.module = module
        self.name = name
        self.swap = swap

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What `forward` returns."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        region = Region(self.swap, self.module, self.name)
        with saved_tensors_hooks(region.pack, region.unpack):
            found = self.forward(*args, **kwargs)
        region.leave()
        return found


class Swap:
    """What the swapped modules of a model share: the copies, and the order in which the modules ran."""

    def __init__(self, device: torch.device, transfer: Transfer | None = None) -> None:
        self.transfer = transfer or Transfer(device)
        # By storage, its size and version: autograd keeps one for several operators, in a module or in several.
        self.kept: weakref.WeakValueDictionary[tuple[int, int, int], Kept] = weakref.WeakValueDictionary()
        self.last: Callable[[], Region | None] = _nothing
        self.leaving: Callable[[], Region | None] = _nothing

    def __reduce__(self) -> tuple[type[Swap], tuple[torch.device]]:
        """For a copy of the model, or a model on disk: another, in which nothing has run."""
        return Swap, (self.transfer.device,)

    @property
    def host_bytes(self) -> int:
        """The bytes that are kept on the host now."""
        return sum(one.host.nbytes for one in self.kept.values() if one.host is not None)


class Kept:
    """A storage that autograd keeps: on the device, then on the host, and on the device again for the backward pass.

    It lives as long as the graph refers to it.
    """

    def __init__(self, tensor: torch.Tensor, region: str) -> None:
        self.region = region
        self.storage: torch.UntypedStorage | None = tensor.untyped_storage()
        self.host: torch.Tensor | None = None
        # No other storage gets the address, by which this one is found, as long as there is a reference.
        self._address = StorageWeakRef(self.storage)
        # Shares the version counter of what was saved, whatever it is called by when it is changed.
        self._alias: torch.Tensor | None = tensor.detach()
        self._version, self._size = tensor._version, self.storage.nbytes()
        self._back: torch.UntypedStorage | None = None
        self._ready: Event | None = None
        self._is_lost = False

    @property
    def is_changed(self) -> bool:
        """Whether the storage holds something else than was saved; FSDP2 gives memory away below it."""
        alias = self._alias
        return alias is not None and (alias._version, alias.untyped_storage().nbytes()) != (self._version, self._size)

    def let_go(self) -> None:
        """Leave the storage to its owners, if it has any; what they have changed before is lost."""
        self._is_lost = self._is_lost or self.is_changed
        self.storage = self._alias = None

    def come_back(self, transfer: Transfer) -> None:
        """Begin to copy it to the device again, unless it is there."""
        if self.storage is None and self._back is None and not self._is_lost:
            assert self.host is not None
            self._back, self._ready = transfer.to_device(self.host)

    def on_device(self, transfer: Transfer) -> torch.UntypedStorage:
        """What was saved, on the device.

        Raises:
            RunError: it was changed before it was copied.
        """
        if self.is_changed:
            self.let_go()
        if self.storage is not None:
            return self.storage
        self.come_back(transfer)
        if self._back is None:
            raise _changed(self.region)
        transfer.wait(self._ready)
        return self._back


@dataclass(frozen=True, eq=False)
class View:
    """What autograd holds in the place of a tensor: its storage, wherever that is, and what the tensor sees of it."""

    kept: Kept
    region: Region
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor, of this storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, eq=False)
class Stayed:
    """What autograd holds in the place of a tensor that stays, such as a weight; its version tells of changes."""

    alias: torch.Tensor
    version: int


@dataclass(frozen=True, eq=False)
class Parts:
    """What autograd holds in the place of a tensor that is made of others, such as a `DTensor`."""

    kind: Any
    parts: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


class Region:
    """A run of a swapped module's forward, and its backward pass."""

    def __init__(self, swap: Swap, module: nn.Module, name: str) -> None:
        self._swap = swap
        self._name = name
        # Looked at whenever something is saved, since FSDP2 and tensor parallelism exchange what is in them.
        self._tables = [table for one in module.modules() for table in (one._parameters, one._buffers)]
        self._own: dict[int, torch.Tensor] = {}
        self._own_storages: set[int] = set()
        self._kept: list[weakref.ref[Kept]] = []
        self._copied: Event | None = None
        self._previous = swap.last
        self._has_come_back = False

    def pack(self, tensor: torch.Tensor) -> Any:
        """What the graph is to hold in the place of a tensor."""
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.trigger_wait()
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            parts = {name: self.pack(getattr(tensor, name)) for name in names}
            return Parts(type(tensor), parts, context, tensor.size(), tensor.stride())
        if not self._is_movable(tensor):
            return Stayed(tensor.detach(), tensor._version)
        storage = tensor.untyped_storage()
        key = (storage._cdata, storage.nbytes(), tensor._version)
        kept = self._swap.kept.get(key)
        if kept is None:
            kept = self._swap.kept[key] = Kept(tensor, self._name)
        self._kept.append(weakref.ref(kept))
        return View(kept, self, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor that `pack` was given.

        Raises:
            RunError: it was changed after it was computed with.
        """
        if isinstance(packed, View):
            self._come_back()
            return packed.tensor(packed.kept.on_device(self._swap.transfer))
        if isinstance(packed, Parts):
            parts = {name: self.unpack(one) for name, one in packed.parts.items()}
            made: torch.Tensor = packed.kind.__tensor_unflatten__(parts, packed.context, packed.size, packed.stride)
            return made
        assert isinstance(packed, Stayed)
        if packed.alias._version != packed.version:
            raise _changed(self._name)
        return packed.alias

    def leave(self) -> None:
        """Copy what was kept to the host, the forward having ended.

        It leaves the device once it is copied: at once, or on an accelerator when the next module's forward has ended.
        Until then it can't be changed unnoticed, and the last module's, which is needed first, never has to come back.
        """
        self._tables, self._own, self._own_storages = [], {}, set()
        swap = self._swap
        leaving = {one: one.storage for one in self._alive() if one.host is None and one.storage is not None}
        hosts, self._copied = swap.transfer.to_host(list(leaving.values()))
        for one, host in zip(leaving, hosts, strict=True):
            one.host = host
        if swap.transfer.is_at_once:
            self._let_go()
        else:
            before, swap.leaving = swap.leaving(), weakref.ref(self)
            if before is not None:
                before._let_go()
        swap.last = weakref.ref(self)

    def _let_go(self) -> None:
        self._swap.transfer.wait(self._copied)
        for one in self._alive():
            one.let_go()

    def _come_back(self) -> None:
        """Begin to fetch everything, and what the module that ran before kept: its backward pass is the next."""
        if self._has_come_back:
            return
        self._has_come_back = True
        before = self._previous()
        for kept in [*self._alive(), *(before._alive() if before is not None else [])]:
            kept.come_back(self._swap.transfer)

    def _alive(self) -> list[Kept]:
        return list(dict.fromkeys(one for reference in self._kept if (one := reference()) is not None))

    def _is_movable(self, tensor: torch.Tensor) -> bool:
        plain = tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()
        if not plain or tensor.device != self._swap.transfer.device or not tensor.untyped_storage().nbytes():
            return False
        for table in self._tables:
            for one in table.values():
                if one is not None and id(one) not in self._own:
                    self._own[id(one)] = one
                    local = one._local_tensor if isinstance(one, DTensor) else one
                    self._own_storages.add(local.untyped_storage()._cdata)
        return tensor.untyped_storage()._cdata not in self._own_storages


def _nothing() -> None:
    return None


def _changed(region: str) -> RunError:
    return RunError(
        f"activation_swap: something that {region} needs for its gradients was changed in place, or freed, after it "
        "was computed with; compute it out of place, or leave the module out of the swapped"
    )
