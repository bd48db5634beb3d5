"""Each check of a trainer catches one that breaks its promise, and lets pass those that keep all."""

from __future__ import annotations

from typing import Any

import pytest

from hp_core.testing import trainer_checks
from hp_core.testing.checks import Check
from hp_core.testing.trainer_runs import TrainerCase
from hp_core.testing.trainers import TrainerChecks
from tests.testing import broken_trainers as broken
from tests.testing.caught import failures

ON_RANKS = {"two_ranks"}


@trainer_checks(broken.Plain)
def test_the_text_trainer_keeps_every_promise(check: Check) -> None:
    check()


# The trainer, the check that is to name its fault, and a part of what it says.
CAUGHT = [
    (broken.LosesTheGraph, "trains", "no weight moves"),
    (broken.DividesByRows, "micro_batches", "with micro-batches of 2 instead of 4 rows 'loss' of step 1 is"),
    (broken.DividesByRows, "padding", "with two empty rows in every second step 'loss' of step 1 is"),
    (broken.DrawsAtRandom, "get_batch", "get_batch draws from the global random stream of torch"),
    (broken.Remembers, "get_batch", "for the same rows a second time, the model's inputs: labels is off by"),
    (broken.Remembers, "resume", "resumed after step 2, 'tokens' of step 4 is"),
    (broken.Alternates, "resume", "resumed after step 1 in another process, 'loss' of step 2 is"),
    (broken.AlternatesAsAClass, "resume", "resumed after step 1 in another process, 'loss' of step 2 is"),
    (broken.TakesTwo, "get_batch", "takes more than one batch off the loader"),
    (broken.TrainsOnPadding, "padding", "with two empty rows in every second step 'tokens' of step 2 is"),
    (broken.DividesByLength, "lengths", "with rows of different lengths in a micro-batch 'loss' of step 1 is"),
    (broken.DropsPositions, "documents", "the documents of each row in the opposite order 'loss' of step 1 is"),
    (broken.TrainsOnPadding, "no_targets", "a step of empty rows counts"),
    (broken.MovesAtOnce, "no_targets", "after a first step of empty rows a weight: lm_head.weight is off by"),
    (broken.SharpensLogits, "export", "the exported model: the largest of the logits is off by"),
    (broken.HidesItsModel, "export", "OwnLlamaForCausalLM is not part of transformers"),
    (broken.CountsEvaluations, "evaluation", "with evaluations in between, 'loss' of step 2 is"),
    (broken.DependsOnTheRank, "two_ranks", "on two ranks with micro-batches of 2 rows 'loss' of step 1 is"),
]


@pytest.mark.parametrize(("component", "name", "text"), CAUGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_promise_is_caught_by_its_own_check(component: Any, name: str, text: str) -> None:
    checks = TrainerChecks(TrainerCase(component)).checks()
    found = failures([one for one in checks if one.name == name])
    assert f"{component.__name__} breaks {name!r}" in found[name]
    assert text in found[name]


def test_a_faulty_trainer_keeps_its_other_promises() -> None:
    """Evaluations are filled up with empty rows as steps are, and its targets reach across documents."""
    found = failures(TrainerChecks(TrainerCase(broken.TrainsOnPadding)).checks(), ON_RANKS)
    assert set(found) == {"padding", "lengths", "documents", "no_targets", "evaluation"}
