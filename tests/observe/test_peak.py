"""The measured peak of a device: no slower than a plain product, soon done, and nothing else notices."""

from __future__ import annotations

import time

import pytest
import torch

from hp_core.observe import peak
from hp_core.observe.peak import measured_peak

CPU = torch.device("cpu")


class Products:
    """Products of matrices that take as long as a device of this peak needs, on a clock of their own."""

    def __init__(self, tflops: float, too_large: int = 1 << 20) -> None:
        self.now, self.tflops, self.too_large, self.sizes = 0.0, tflops, too_large, [0]

    def perf_counter(self) -> float:
        return self.now

    def factors(self, size: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[int, int, int]:
        if size >= self.too_large:
            raise torch.OutOfMemoryError
        return size, size, size

    def seconds(self, size: int, *_: int) -> float:
        self.sizes.append(size)
        # A start that small products wait for longer than they take.
        took = 1e-5 + 2 * size**3 / (self.tflops * 1e12)
        self.now += took
        return took


@pytest.mark.parametrize(("tflops", "largest"), [(0.02, 1024), (0.5, 2048), (800.0, 8192)])
def test_products_grow_until_they_take_long(monkeypatch, tflops: float, largest: int) -> None:
    products = Products(tflops)
    monkeypatch.setattr(peak, "time", products)
    monkeypatch.setattr(peak, "_factors", products.factors)
    monkeypatch.setattr(peak, "_seconds", products.seconds)
    assert measured_peak(CPU, torch.float32) == pytest.approx(tflops, rel=0.02)
    assert max(products.sizes) == largest
    assert products.now < 0.3


def test_memory_that_is_full_ends_it(monkeypatch) -> None:
    products = Products(800.0, too_large=4096)
    monkeypatch.setattr(peak, "time", products)
    monkeypatch.setattr(peak, "_factors", products.factors)
    monkeypatch.setattr(peak, "_seconds", products.seconds)
    assert measured_peak(CPU, torch.float32) == pytest.approx(800, rel=0.5)
    assert max(products.sizes) == 2048


def test_a_real_one_is_of_the_rate_of_products_and_draws_no_numbers_of_the_run() -> None:
    before = torch.get_rng_state()
    found = measured_peak(CPU, torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    left, right = torch.rand(512, 512), torch.rand(512, 512)
    times = []
    for _ in range(20):
        started = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - started)
    assert found > 0.2 * 2 * 512**3 / sorted(times)[10] / 1e12
