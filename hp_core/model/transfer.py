"""Copies of storages between the device that computes and the memory of its host, beside the computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

Event = Any


class Streams(Protocol):
    """The part of `torch.cuda`, or of another accelerator's module, that copies need."""

    def Stream(self, device: torch.device) -> Any: ...  # noqa: D102, N802  # torch's own name
    def stream(self, stream: Any) -> Any: ...  # noqa: D102
    def current_stream(self, device: torch.device) -> Any: ...  # noqa: D102


class Transfer:
    """Copies of whole storages, on an accelerator on a stream of its own and from and to pinned memory.

    An accelerator computes on while it copies: each copy gives an event for which the stream that computes has to wait
    before it uses what was copied, or gives its memory to others. On the CPU a copy is done at once, and has none.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        """Copy to and from `device`; `streams` is its module in torch, except in a test."""
        self.device = device
        self._streams = streams
        if streams is None and device.type != "cpu":
            self._streams = torch.get_device_module(device)
        self._side = None if self._streams is None else self._streams.Stream(device)

    @property
    def is_at_once(self) -> bool:
        """Whether a copy is done when the call returns."""
        return self._streams is None

    def to_host(self, storages: Sequence[torch.UntypedStorage]) -> tuple[list[torch.Tensor], Event | None]:
        """Copies of storages, (bytes,) each in uint8; the storages have to live until the event."""
        sources = [as_bytes(one) for one in storages]
        pinned = self.device.type != "cpu"
        hosts = [torch.empty(one.shape, dtype=one.dtype, device="cpu", pin_memory=pinned) for one in sources]
        return hosts, self._copied(list(zip(hosts, sources, strict=True)))

    def to_device(self, host: torch.Tensor) -> tuple[torch.UntypedStorage, Event | None]:
        """A new storage with what `to_host` copied, whole once the event has come."""
        target = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        event = self._copied([(target, host)])
        if self._side is not None:
            # It may be given up before anything has waited for the copy, when its memory must not be another's yet.
            self.hold(target, self._side)
        return target.untyped_storage(), event

    def wait(self, event: Event | None) -> None:
        """Have the stream that computes go on only after a copy; the host doesn't wait."""
        if event is not None and self._streams is not None:
            self._streams.current_stream(self.device).wait_event(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy, on an accelerator whenever its stream gets to it."""
        target.copy_(source, non_blocking=True)

    def hold(self, target: torch.Tensor, stream: Any) -> None:
        """Keep the memory of a tensor from all others until a stream has got through what it has been given."""
        target.record_stream(stream)

    def _copied(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Event | None:
        if self._streams is None or self._side is None:
            for target, source in pairs:
                self.copy(target, source)
            return None
        # What is read is computed, and what is written over is used, by what the computation has been given so far.
        self._side.wait_stream(self._streams.current_stream(self.device))
        with self._streams.stream(self._side):
            for target, source in pairs:
                self.copy(target, source)
        return self._side.record_event()


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage, (bytes,) in uint8, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
