"""How much of the weight files ranks read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.bytes_read import bytes_read


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counts pages that Linux marks as accessed")
def test_ranks_that_share_a_model_read_each_byte_once_and_copies_read_it_each() -> None:
    assert 0.99 < bytes_read()["bytes_read_ratio"] < 1.05
    # That it can tell is part of the test.
    assert 1.98 < bytes_read(copies=2)["bytes_read_ratio"] < 2.1
