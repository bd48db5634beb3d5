"""Which metrics a run will log, as far as that is known before its first step."""

from __future__ import annotations

import typing
from collections.abc import Iterable

import torch
from torch import nn

from hp_core.errors import InputError, Problem
from hp_core.spelling import did_you_mean, nearest
from hp_core.training.accounting import METRICS
from hp_core.training.loss import HasStepTerms, NamesStepTerms

KEY = "checkpoint.keep_best.metric"
_EVAL = "eval_"
_OF_EVALUATIONS = ("loss", "tokens", "time_s")
# Names that begin so are those of the data's sources.
_OF_SOURCES = ("rows/", "targets/")


def unmeasured(metric: str, names: Iterable[str]) -> InputError:
    """What to raise for a metric that is none of those that are measured."""
    known = sorted(names)
    hint = did_you_mean(metric, known) or f"what is: {', '.join(known)}"
    return InputError(Problem(f"no {metric!r} is measured", path=KEY, hint=hint))


def require_measured(metric: str | None, loss_fn: nn.Module, *, counts_more: bool) -> None:
    """Refuse to judge checkpoints by a metric of which is known that nothing will measure it.

    Args:
        metric: what the recipe says.
        loss_fn: the run's loss, some of whose entries may be known.
        counts_more: whether the trainer counts something of its own in each step.

    Raises:
        InputError: with what is measured.
    """
    if metric is None or metric.startswith(_OF_SOURCES):
        return
    is_plain = _returns_a_tensor(loss_fn)
    terms = loss_fn.step_term_names if isinstance(loss_fn, NamesStepTerms) else ()
    names_terms = isinstance(loss_fn, NamesStepTerms) or not isinstance(loss_fn, HasStepTerms)
    of_step = ("loss", *sorted(METRICS - {"step", "skipped", "time_s"}), *terms)
    of_evaluation = tuple(_EVAL + name for name in _OF_EVALUATIONS)
    of_all = (*of_step, *of_evaluation)
    are_all = is_plain and (metric.startswith(_EVAL) or (names_terms and not counts_more))
    # An entry of a loss may have any name, but for one that only case and - or _ tell from another.
    if metric not in (*of_all, *METRICS) and (are_all or nearest(metric, of_all, cutoff=1.0)):
        raise unmeasured(metric, of_evaluation if metric.startswith(_EVAL) else of_all)


def _returns_a_tensor(loss_fn: nn.Module) -> bool:
    """Whether the loss says so: it is one number, and has no entries of its own."""
    try:
        return typing.get_type_hints(type(loss_fn).forward).get("return") is torch.Tensor
    # Hints may name whatever is not there while nothing checks types.
    except Exception:
        return False
