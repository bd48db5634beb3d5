"""Leaves whatever a module remembers as it was: attributes, containers, tensors and random generators, in place."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

# What these define holds no state of a loss, and may reach the whole process.
_FOREIGN = frozenset({"builtins", "torch", "transformers", "numpy", "hp_core", "pluggy"})


@contextmanager
def restored(module: nn.Module, *, apart_from: nn.Module) -> Iterator[None]:
    """Whatever happens inside leaves no trace in `module` and in the objects that it holds.

    Everything is put back into the objects that were there, since others may hold them too: a hook of the model, a
    plugin. A copy of the module would not do, as those would go on calling the original. Parameters are left alone:
    nothing trains those of a loss, and a teacher's would fill the device a second time, or be gathered by FSDP2 when
    they are put back.

    Args:
        module: a loss.
        apart_from: the model, which a loss may hold and which is left alone.
    """
    memory = _Memory(apart_from)
    memory.remember(module)
    try:
        yield
    finally:
        memory.put_back()


class _Memory:
    """What was found, as functions that put it back."""

    def __init__(self, apart_from: nn.Module) -> None:
        self._undo: list[Callable[[], None]] = []
        self._known = {id(one) for one in apart_from.modules()}
        self._known |= {id(one) for one in apart_from.buffers()}

    def put_back(self) -> None:
        for undo in self._undo:
            undo()

    def remember(self, value: Any) -> None:
        if id(value) in self._known:
            return
        self._known.add(id(value))
        if isinstance(value, nn.Parameter):
            return
        if isinstance(value, torch.Tensor):
            self._remember_tensor(value)
        elif isinstance(value, (dict, list, set, deque, tuple)):
            self._remember_container(value)
        elif isinstance(value, torch.Generator):
            state = value.get_state()
            self._undo.append(lambda: _set_state(value, state))
        elif isinstance(value, random.Random):
            held = value.getstate()
            self._undo.append(lambda: value.setstate(held))
        elif isinstance(value, np.random.Generator):
            bits, stream = value.bit_generator, value.bit_generator.state
            self._undo.append(lambda: _set_stream(bits, stream))
        elif isinstance(value, nn.Module):
            self._known.add(id(value._parameters))
            self.remember(vars(value))
        elif not _is_foreign(value):
            self._remember_attributes(value)

    def _remember_tensor(self, value: torch.Tensor) -> None:
        before, version = value.detach().clone(), value._version

        def undo() -> None:
            if value._version != version:
                with torch.no_grad():
                    value.copy_(before)

        self._undo.append(undo)

    def _remember_container(self, value: Any) -> None:
        held = list(value.items()) if isinstance(value, dict) else list(value)

        def undo() -> None:
            value.clear()
            if isinstance(value, (dict, set)):
                value.update(held)
            else:
                value.extend(held)

        if not isinstance(value, tuple):
            self._undo.append(undo)
        for item in held:
            self.remember(item[1] if isinstance(value, dict) else item)

    def _remember_attributes(self, value: Any) -> None:
        try:
            attributes = vars(value)
        except TypeError:
            return  # it has none
        self.remember(attributes)


def _is_foreign(value: Any) -> bool:
    if isinstance(value, (type, ModuleType, FunctionType, MethodType)):
        return True
    return type(value).__module__.partition(".")[0] in _FOREIGN


def _set_state(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _set_stream(bits: np.random.BitGenerator, state: Any) -> None:
    bits.state = state
