"""How fast a device multiplies matrices: what MFU is relative to where the recipe doesn't say."""

from __future__ import annotations

import time

import torch

# Threads that wait for each other on a busy machine cost a small product more than the product itself.
_SMALLEST, _LARGEST = 1024, 8192
_SECONDS = 0.15
# A product that takes longer is large enough: only large ones keep a GPU busy, and a CPU has no time for them.
_LONG = _SECONDS / 30


@torch.no_grad()
def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """The best rate of products of square matrices in `dtype` on a device, in TFLOP/s; takes 0.15 seconds or so.

    With the threads that this process computes with. The random numbers of the run stay as they are.
    """
    generator = torch.Generator(device).manual_seed(0)
    size, best = _SMALLEST, 0.0
    factors = _factors(size, dtype, generator)
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        seconds = _seconds(*factors)
        best = max(best, 2 * size**3 / seconds)
        if seconds < _LONG and size < _LARGEST:
            try:
                factors = _factors(2 * size, dtype, generator)
            except torch.OutOfMemoryError:
                break
            size *= 2
    return best / 1e12


def _factors(size: int, dtype: torch.dtype, generator: torch.Generator) -> list[torch.Tensor]:
    tensors = [torch.empty(size, size, dtype=dtype, device=generator.device) for _ in range(3)]
    for one in tensors:
        one.uniform_(-1, 1, generator=generator)
    return tensors


def _seconds(left: torch.Tensor, right: torch.Tensor, result: torch.Tensor) -> float:
    _wait(left.device)
    started = time.perf_counter()
    torch.mm(left, right, out=result)
    _wait(left.device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
