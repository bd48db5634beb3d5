"""What a failure says, whichever way a component fails on several ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hp_core.testing.checks import (
    BrokenPromiseError,
    Check,
    Section,
    on_ranks,
    require_close,
    require_equal,
)
from hp_core.testing.loss_steps import LossCase
from hp_core.testing.losses import LossChecks
from hp_core.testing.ranks import RankError, run_ranks
from tests.testing.broken_losses import SumLoss


def twice(setup: Any, case: int) -> int:
    return 2 * case + setup.rank


def fails_on_rank_one(setup: Any, case: int) -> None:
    if setup.rank == 1:
        raise ValueError(f"no {case}")
    dist.barrier()


def dies(setup: Any, case: int) -> None:
    os._exit(3)


def test_a_section_after_a_failed_one_says_what_failed_first() -> None:
    results = on_ranks([Section("one", twice), Section("two", fails_on_rank_one), Section("three", twice)], 5)
    assert results.of("one") == [10, 11]
    assert results.has("one")
    assert not results.has("two")
    with pytest.raises(BrokenPromiseError, match=r"^rank 1 of 2: ValueError: no 5"):
        results.of("two")
    with pytest.raises(BrokenPromiseError, match=r"^it was not reached, because 'two' failed: rank 1 of 2: ValueError"):
        results.of("three")


def test_a_rank_that_dies_is_told() -> None:
    message = r"ended without a word \(exit code 3\); a collective that not every rank joins"
    with pytest.raises(BrokenPromiseError, match=message):
        on_ranks([Section("one", dies)], 5)


def test_a_component_inside_a_function_is_told() -> None:
    class Local(SumLoss):
        pass

    (check,) = [one for one in LossChecks(LossCase(Local)).checks() if one.name == "two_ranks"]
    with pytest.raises(BrokenPromiseError, match="define the component at the top level of a module"):
        check()


def test_a_function_that_ranks_can_t_import_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("only_in_this_process")
    exec("def function(environment):\n    return 1\n", vars(module))
    monkeypatch.setitem(sys.modules, "only_in_this_process", module)
    with pytest.raises(RankError, match="No module named 'only_in_this_process'"):
        run_ranks(module.function, 1)


def test_a_failure_names_component_promise_and_cause() -> None:
    def stumble() -> None:
        raise KeyError("nothing")

    with pytest.raises(BrokenPromiseError) as caught:
        Check("state", "MyLoss", "it can be resumed", stumble)()
    assert str(caught.value) == "MyLoss breaks 'state' (it can be resumed): it raises KeyError: 'nothing'"
    assert isinstance(caught.value.__cause__, KeyError)


def test_close_is_relative_to_the_largest_of_all() -> None:
    wanted = {"a": torch.tensor([100.0, 1.0]), "b": torch.tensor([1e-3])}
    require_close({"a": torch.tensor([100.0, 1.0]), "b": torch.tensor([2e-3])}, wanted, 1e-4, "the gradient", "")
    with pytest.raises(
        BrokenPromiseError, match=r"the gradient of b is off by 0.02, where the largest is 100 and 0.01"
    ):
        require_close({"a": wanted["a"], "b": torch.tensor([0.021])}, wanted, 1e-4, "the gradient", "mend it")
    with pytest.raises(BrokenPromiseError, match="the gradient of b is not finite; mend it"):
        require_close({"a": wanted["a"], "b": torch.tensor([torch.nan])}, wanted, 1e-4, "the gradient", "mend it")
    with pytest.raises(BrokenPromiseError, match=r"only one side has \['b'\]"):
        require_close({"a": wanted["a"]}, wanted, 1e-4, "the gradient", "")


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (torch.ones(2, dtype=torch.bfloat16), "a is bfloat16 (2,) instead of float32 (2,)"),
        (torch.ones(3), "a is float32 (3,) instead of float32 (2,)"),
        (torch.tensor([1.0, 1.5]), "a is off by up to 0.5"),
        (3, "a is 3 instead of tensor"),
    ],
)
def test_equal_means_dtype_shape_and_bits(found: Any, text: str) -> None:
    require_equal({"a": torch.ones(2)}, {"a": torch.ones(2)}, "", "")
    with pytest.raises(BrokenPromiseError) as caught:
        require_equal({"a": found}, {"a": torch.ones(2)}, "afterwards", "")
    assert text in str(caught.value)
