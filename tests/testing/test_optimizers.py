"""Each check of an optimizer catches one that breaks its promise, and lets pass those that keep all."""

from __future__ import annotations

from typing import Any

import pytest

from hp_core.testing import optimizer_checks
from hp_core.testing.checks import BrokenPromiseError, Check
from hp_core.testing.optimizer_steps import OptimizerCase
from hp_core.testing.optimizers import OptimizerChecks
from tests.testing import broken_optimizers as broken
from tests.testing.caught import failures

ON_RANKS = {"sharded_update", "state_on_shards"}


@optimizer_checks(broken.Momentum)
def test_an_optimizer_keeps_every_promise(check: Check) -> None:
    check()


@optimizer_checks(broken.Holder, lr=1e-3, family="gpt2")
def test_one_that_is_offered_keeps_every_promise(check: Check) -> None:
    check()


# The optimizer, the checks that catch it, and a part of what the first of them says.
CAUGHT = [
    (broken.Explodes, ["contract"], "is not finite"),
    (broken.takes_frozen, ["each_parameter_once"], "on llama: it holds ['model.embed_tokens.weight'], which is frozen"),
    (broken.tied_twice, ["each_parameter_once"], "on llama_tied: "),
    (broken.tied_in_two_groups, ["each_parameter_once"], "on llama_tied: "),
    (broken.thaws, ["each_parameter_once"], "it makes ['model.embed_tokens.weight'] trainable again"),
    (broken.misses_vectors, ["each_parameter_once", "each_parameter_moves"], "does not hold 'model.layers.0.input_lay"),
    (broken.ForgetsVectors, ["each_parameter_moves"], "a step leaves model.layers.0.input_layernorm.weight where it"),
    (broken.DecaysWithoutGradient, ["missing_gradients"], "a step without its gradient moves model.layers"),
    (broken.CoastsWithoutGradient, ["missing_gradients"], "a step without its gradient moves model.embed_tokens"),
    (broken.DividesByZero, ["zero_gradients", "decay_exclusions"], "is not finite after it"),
    (broken.DecaysUndeclared, ["zero_gradients"], "whose group declares no weight_decay"),
    (broken.DecaysTwice, ["zero_gradients"], "lr 0.01 and weight_decay 0.1 make it 0.999"),
    (broken.IgnoresDecay, ["zero_gradients"], "it scales model.embed_tokens.weight by 1;"),
    (broken.NoisyStep, ["zero_gradients"], "besides scaling it"),
    (broken.DecaysEverything, ["decay_exclusions"], "on llama, weight decay moves model.layers.0.input_layernorm"),
    (broken.DecaysBiases, ["decay_exclusions"], "on gpt2, weight decay moves transformer.h.0.ln_1.weight"),
    (broken.KeepsItsRate, ["learning_rate"], "with a learning rate of zero, steps move"),
    (broken.TakesTheFirstRate, ["learning_rate"], "with a learning rate of zero in its own group, 1, steps move"),
    (broken.DecaysWithoutRate, ["learning_rate"], "scale weight decay by it too"),
    (broken.StepsWhenBuilt, ["no_hidden_step"], "building it moves"),
    (broken.StepsWhenAsked, ["no_hidden_step"], "state_dict() moves"),
    (broken.FillsItsState, ["no_hidden_step"], "the first steps are others"),
    (broken.CountsInAttribute, ["state_round_trip"], "keep what it remembers in optimizer.state[parameter]"),
    (broken.RemembersTheStart, ["state_round_trip"], "after saving and resuming: model.embed_tokens.weight is off"),
    (broken.KeepsAList, ["state_round_trip"], "optimizer state 'history' of model.embed_tokens.weight is a list"),
]


@pytest.mark.parametrize(("component", "names", "text"), CAUGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_promise_is_caught_by_its_own_check(component: Any, names: list[str], text: str) -> None:
    found = failures(OptimizerChecks(OptimizerCase(component)).checks(), ON_RANKS)
    assert set(names) == set(found) or names[0] == "contract", found
    assert f"{component.__name__} breaks {names[0]!r}" in found[names[0]]
    assert text in found[names[0]]


@pytest.mark.parametrize(
    ("component", "text"),
    [
        (broken.no_optimizer, "optimizer: built a dict, expected torch.optim.Optimizer"),
        (broken.without_model, "unexpected keyword argument 'model'"),
    ],
)
def test_what_is_no_optimizer_is_caught_by_the_contract(component: Any, text: str) -> None:
    (check,) = [one for one in OptimizerChecks(OptimizerCase(component)).checks() if one.name == "contract"]
    with pytest.raises(BrokenPromiseError, match="breaks 'contract'") as caught:
        check()
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("component", "names", "text"),
    [
        (broken.NormOfItsShard, ["sharded_update"], "norms and matrix products need the whole tensor"),
        (broken.PlainState, ["state_on_shards"], "after saving and resuming on two ranks: model.embed_tokens.weight"),
        (broken.KeepsAList, ["state_on_shards", "state_round_trip"], "rank"),
    ],
)
def test_what_breaks_on_shards_is_caught(component: Any, names: list[str], text: str) -> None:
    found = failures(OptimizerChecks(OptimizerCase(component)).checks())
    assert sorted(found) == sorted(names), found
    assert text in found[names[0]]


def test_an_optimizer_without_decay_skips_its_exclusions() -> None:
    mark = optimizer_checks(broken.Holder, lr=1e-3).mark
    assert {one.id for one in mark.args[1] if one.marks} == {"decay_exclusions"}
    assert not [one for one in optimizer_checks(broken.Momentum).mark.args[1] if one.marks]


def test_every_check_catches_something() -> None:
    """Those that the other tests above are for, and those that their table names first."""
    first = {names[0] for *_, names, _ in CAUGHT}
    assert first | ON_RANKS == {check.name for check in OptimizerChecks(OptimizerCase(broken.Momentum)).checks()}
