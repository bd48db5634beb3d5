"""Random numbers of tensor ranks: alike where they compute the same, their own where each has a part."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def own_random_numbers(tp_rank: int) -> Iterator[None]:
    """Other random numbers on each tensor rank, whose heads are others; afterwards all go on alike.

    Outside a region tensor ranks must drop the same, so they share one stream.
    """
    seed = int(torch.randint(2**62, ()))
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed + tp_rank)
        yield


class OwnDropout:
    """Takes the place of a dropout's forward where each rank has other tokens or features."""

    def __init__(self, dropout: nn.Dropout, tp_rank: int) -> None:
        self._dropout = dropout
        self._forward: Callable[[torch.Tensor], torch.Tensor] = dropout.forward
        self._tp_rank = tp_rank

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Drop by this rank's own numbers."""
        if not self._dropout.training or self._dropout.p == 0:
            return self._forward(input)
        with own_random_numbers(self._tp_rank):
            return self._forward(input)


class CommonDropout:
    """Takes the place of a dropout's forward where ranks draw apart, and all have the same features and tokens."""

    def __init__(self, dropout: nn.Dropout, tp_rank: int, name: str) -> None:
        self._forward: Callable[[torch.Tensor], torch.Tensor] = dropout.forward
        self._dropout = dropout
        self._tp_rank = tp_rank
        self._name = name

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Drop the same on all ranks: what they draw apart from differs by their numbers, see `own_random_numbers`."""
        if not self._dropout.training or self._dropout.p == 0:
            return self._forward(input)
        common = f"{torch.initial_seed() - self._tp_rank}/{self._name}".encode()
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(int.from_bytes(hashlib.blake2b(common, digest_size=8).digest(), "big") >> 1)
            return self._forward(input)
