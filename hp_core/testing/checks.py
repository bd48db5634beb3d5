"""What a check is, how a broken promise is told, and how checks become pytest tests."""

from __future__ import annotations

import functools
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
from transformers.utils import logging as hf_logging

from hp_core.errors import HpError
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.setup import DistributedSetup
from hp_core.testing.ranks import RankError, run_ranks
from hp_core.testing.setups import tiny_setup

T = TypeVar("T")


class BrokenPromiseError(AssertionError):
    """A component doesn't keep a promise; the text says which, with the numbers and what to do."""


@dataclass(frozen=True, repr=False)
class Check:
    """One promise about one component, checked when it is called."""

    name: str
    subject: str
    promise: str
    function: Callable[[], None]

    def __repr__(self) -> str:
        return f"<{self.name} of {self.subject}>"

    def __call__(self) -> None:
        """Check the promise.

        Raises:
            BrokenPromiseError: it isn't kept, or the component raised.
        """
        __tracebackhide__ = True
        heading = f"{self.subject} breaks {self.name!r} ({self.promise})"
        try:
            with without_progress_bars():
                self.function()
        except BrokenPromiseError as broken:
            raise BrokenPromiseError(f"{heading}: {broken}") from None
        except Exception as error:
            raise BrokenPromiseError(f"{heading}: it raises {described(error)}") from error


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers' bars for reading and writing files out of what a failed test prints."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def name_of(component: Any) -> str:
    """What messages call a component."""
    function = component.func if isinstance(component, functools.partial) else component
    return getattr(function, "__qualname__", None) or str(function)


def described(error: BaseException) -> str:
    """An exception in a line."""
    text = str(error)
    if isinstance(error, HpError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def require(condition: bool, text: str) -> None:
    """Raise `BrokenPromiseError(text)` unless the condition holds."""
    if not condition:
        raise BrokenPromiseError(text)


def parametrize(checks: Sequence[Check], skip: Mapping[str, str]) -> pytest.MarkDecorator:
    """The decorator that runs a test function once for each check, by name.

    Args:
        checks: become the argument `check`.
        skip: why a check doesn't apply to this component, by its name.

    Raises:
        ValueError: `skip` names something that is no check.
    """
    unknown = sorted(set(skip) - {check.name for check in checks})
    if unknown:
        raise ValueError(f"skip names {unknown[0]!r}; the checks are {', '.join(check.name for check in checks)}")
    return pytest.mark.parametrize(
        "check",
        [
            pytest.param(check, id=check.name, marks=[pytest.mark.skip(reason=skip[check.name])])
            if check.name in skip
            else pytest.param(check, id=check.name)
            for check in checks
        ],
    )


# Several ranks.


@dataclass(frozen=True)
class Section:
    """Something done on every rank of one group of processes; `function(setup, case)` must be importable by name."""

    name: str
    function: Callable[[DistributedSetup, Any], Any]


@dataclass(frozen=True)
class _Outcome:
    value: Any = None
    error: str | None = None
    when: float = 0.0


class RankResults:
    """What sections gave on each rank. A section that failed, or was not reached, says so when it is asked for."""

    def __init__(self, outcomes: Sequence[Mapping[str, _Outcome]]) -> None:
        self._outcomes = outcomes

    def has(self, section: str) -> bool:
        """Whether the section ended well on every rank."""
        return all(section in outcomes and outcomes[section].error is None for outcomes in self._outcomes)

    def of(self, section: str) -> list[Any]:
        """What the section returned, by rank.

        Raises:
            BrokenPromiseError: it raised on some rank, or one before it did.
        """
        failures = [
            (outcome.when, rank, name, outcome.error)
            for rank, outcomes in enumerate(self._outcomes)
            for name, outcome in outcomes.items()
            if outcome.error is not None
        ]
        if self.has(section):
            return [outcomes[section].value for outcomes in self._outcomes]
        # What the other ranks tell is only that a connection broke.
        _, rank, name, error = min(failures)
        reached = "" if name == section else f"it was not reached, because {name!r} failed: "
        raise BrokenPromiseError(f"{reached}rank {rank} of {len(self._outcomes)}: {error}")


def on_ranks(sections: Sequence[Section], case: Any, world_size: int = 2) -> RankResults:
    """Run the sections in order on one group of gloo ranks; starting processes takes longer than all of them.

    Raises:
        BrokenPromiseError: the component can't be sent to other processes, or one of them died.
    """
    try:
        pickle.dumps(case)
    except Exception as error:
        hint = "define the component at the top level of a module"
        raise BrokenPromiseError(f"other processes can't import it: {described(error)}; {hint}") from error
    try:
        return RankResults(run_ranks(_run_sections, world_size, tuple(sections), case))
    except RankError as error:
        hint = "a collective that not every rank joins, with the same sizes, ends processes or keeps them waiting"
        raise BrokenPromiseError(f"{error}; {hint}") from error


def _run_sections(environment: ProcessEnvironment, sections: Sequence[Section], case: Any) -> dict[str, _Outcome]:
    outcomes: dict[str, _Outcome] = {}
    with tiny_setup(environment, timeout=30.0) as setup, warnings.catch_warnings(), without_progress_bars():
        warnings.simplefilter("ignore")  # another process shows them; here they would only be errors by accident
        for section in sections:
            try:
                outcomes[section.name] = _Outcome(section.function(setup, case))
            except Exception as error:
                trace = "".join(traceback.format_exception(error))
                outcomes[section.name] = _Outcome(None, f"{described(error)}\n{trace}", time.time())
                break  # the ranks may be out of step from here on
    return outcomes


# Tensors.


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a DTensor, gathered by all ranks; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


def equal(one: Any, other: Any) -> bool:
    """Whether two tensors or plain values are the same, dtypes and shapes included."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    return not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor) and bool(one == other)


def largest(tensors: Mapping[str, torch.Tensor]) -> float:
    """The largest magnitude in any of the tensors."""
    return max((float(tensor.abs().max()) for tensor in tensors.values() if tensor.numel()), default=0.0)


def require_close(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], tolerance: float, what: str, hint: str
) -> None:
    """Compare tensors by name; they may differ by `tolerance` times the largest magnitude wanted.

    Raises:
        BrokenPromiseError: names the one that differs most, and both numbers.
    """
    require(found.keys() == wanted.keys(), f"{what}: only one side has {sorted(found.keys() ^ wanted.keys())[:3]}")
    allowed = tolerance * largest(wanted)
    worst, name = 0.0, ""
    for one, tensor in wanted.items():
        require(bool(found[one].isfinite().all()), f"{what} of {one} is not finite; {hint}")
        difference = float((found[one].double() - tensor.double()).abs().max()) if tensor.numel() else 0.0
        if difference > worst:
            worst, name = difference, one
    require(
        worst <= allowed,
        f"{what} of {name} is off by {worst:.3g}, where the largest is {largest(wanted):.3g} and {allowed:.3g} is "
        f"allowed; {hint}",
    )


def require_equal(found: Mapping[str, Any], wanted: Mapping[str, Any], what: str, hint: str) -> None:
    """Compare tensors and plain values by name, bit for bit.

    Raises:
        BrokenPromiseError: names the first that differs.
    """
    odd = sorted(found.keys() ^ wanted.keys())
    require(not odd, f"{what}: {odd[0] if odd else ''} is only on one side; {hint}")
    for name, value in wanted.items():
        if not equal(found[name], value):
            raise BrokenPromiseError(f"{what}: {name} is {_unlike(found[name], value)}; {hint}")


def _unlike(found: Any, wanted: Any) -> str:
    if not isinstance(found, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        return f"{found!r} instead of {wanted!r}"
    kinds = [f"{str(one.dtype).removeprefix('torch.')} {tuple(one.shape)}" for one in (found, wanted)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} instead of {kinds[1]}"
    return f"off by up to {float((found.double() - wanted.double()).abs().max()):.3g}"
