"""Seeing that something stayed as it was: tensors in nested containers, a model, a state."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hp_core.testing.checks import BrokenPromiseError, described, require


@dataclass(frozen=True)
class _Seen:
    value: Any
    copy: Any
    version: int


@contextmanager
def untouched(what: str, container: Any) -> Iterator[None]:
    """Refuse any change to the entries of a (nested) mapping, list or tuple, in-place ones included.

    Raises:
        BrokenPromiseError: `what` and the entry that changed.
    """
    before = dict(_walk(container, ""))
    yield
    after = dict(_leaves(container, ""))
    for name in sorted(before.keys() ^ after.keys()):
        raise BrokenPromiseError(f"{what}: it {'adds' if name in after else 'removes'} {name!r}; work on a copy")
    for name, seen in before.items():
        require(after[name] is seen.value, f"{what}: it puts another object under {name!r}; work on a copy")
        if isinstance(seen.value, torch.Tensor):
            same = seen.value._version == seen.version and torch.equal(seen.value, seen.copy)
            require(same, f"{what}: it writes into {name!r}; use operations that aren't in-place")


def _walk(container: Any, prefix: str) -> Iterator[tuple[str, _Seen]]:
    for name, value in _leaves(container, prefix):
        if isinstance(value, torch.Tensor):
            yield name, _Seen(value, value.detach().clone(), value._version)
        else:
            yield name, _Seen(value, None, 0)


def _leaves(container: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(container, Mapping):
        entries = [(str(name), value) for name, value in container.items()]
    else:
        entries = [(str(index), value) for index, value in enumerate(container)]
    for name, value in entries:
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(value, (Mapping, list, tuple)):
            yield from _leaves(value, path)
        else:
            yield path, value


def contents(model: nn.Module) -> dict[str, Any]:
    """Copies of a model's parameters, gradients and buffers, and its flags, by name."""
    found: dict[str, Any] = {f"training of {name or 'it'}": module.training for name, module in model.named_modules()}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach().clone()
        found[f"requires_grad of {name}"] = parameter.requires_grad
        found[f"the gradient of {name}"] = None if parameter.grad is None else parameter.grad.detach().clone()
    found |= {f"buffer {name}": buffer.detach().clone() for name, buffer in model.named_buffers()}
    return found


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a state, as they are now."""
    return {name: value.detach().clone() for name, value in state.items() if isinstance(value, torch.Tensor)}


def stored(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state as it comes back from a file, which holds tensors and plain values only.

    Raises:
        BrokenPromiseError: it holds something else.
    """
    file = io.BytesIO()
    try:
        torch.save(dict(state), file)
        file.seek(0)
        loaded: dict[str, Any] = torch.load(file, weights_only=True)
    except Exception as error:
        text = f"its state can't be stored as tensors and plain values: {described(error)}"
        raise BrokenPromiseError(text) from error
    return loaded
