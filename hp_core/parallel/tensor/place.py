"""Other tensors in the places of a module's parameters, for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def in_place(tensors: Mapping[tuple[nn.Module, str], torch.Tensor | None]) -> Iterator[None]:
    """Let modules compute with other tensors than their parameters, which they have back afterwards."""
    kept = {(owner, name): owner._parameters[name] for owner, name in tensors}
    try:
        for (owner, name), tensor in tensors.items():
            owner._parameters[name] = tensor  # type: ignore[assignment]  # a part is no nn.Parameter
        yield
    finally:
        for (owner, name), parameter in kept.items():
            owner._parameters[name] = parameter
