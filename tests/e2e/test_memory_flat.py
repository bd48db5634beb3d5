"""A long run takes no more memory than a short one; a run without swapping has less that could grow."""

import pytest

from tests.benchmarks.memory import growth_of_a_run
from tests.benchmarks.overhead import MINIMAL

BOTH = ("--activation_checkpoint.mode=full", "--activation_swap.mode=host")


@pytest.mark.parametrize("features", [pytest.param((), marks=pytest.mark.slow), BOTH], ids=["plain", "swapped"])
def test_memory_does_not_grow(features: tuple[str, ...]) -> None:
    growth = growth_of_a_run(*MINIMAL, *features)
    assert growth["growth_bytes"] <= 2**20
    # An object that each of 150 steps leaves has one at least.
    assert growth["growth_python_blocks"] <= 100
