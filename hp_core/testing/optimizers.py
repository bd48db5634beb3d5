"""What an optimizer promises: each parameter once, nothing moved unasked, the same on shards and after a resume."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hp_core.checkpoint.tensors import optimizer_scalars, optimizer_tensors
from hp_core.errors import HpError
from hp_core.parallel.setup import DistributedSetup
from hp_core.testing.checks import (
    BrokenPromiseError,
    Check,
    RankResults,
    Section,
    described,
    name_of,
    on_ranks,
    parametrize,
    require,
    require_equal,
)
from hp_core.testing.models import tiny_model
from hp_core.testing.optimizer_steps import (
    OptimizerCase,
    interrupted_and_not,
    require_unmoved,
    set_gradients,
    take_steps,
    weights,
)
from hp_core.testing.setups import tiny_setup
from hp_core.training.built import require_each_once
from hp_core.training.protocols import parts_of

# Tied, fused experts, and another family's names for embeddings, norms and biases.
FAMILIES_TRIED = ("llama", "llama_tied", "qwen3_moe", "gpt2")


def optimizer_checks(
    component: Callable[..., Any],
    /,
    *,
    family: str = "llama",
    tolerance: float = 1e-4,
    skip: Mapping[str, str] | None = None,
    **arguments: Any,
) -> pytest.MarkDecorator:
    """Run a test function, `def test_optimizer(check): check()`, once for each promise of an optimizer.

    Args:
        component: what a recipe names; importable by name, since other processes import it.
        family: the tiny model whose parameters it gets, one of `hp_core.testing.models.FAMILIES`.
        tolerance: how far a parameter's update on shards may be from the unsharded one, as a share of its norm.
        skip: why a promise doesn't apply, by its name.
        arguments: the component's recipe arguments.
    """
    case = OptimizerCase(component, arguments, family, tolerance)
    reasons = dict(skip or {})
    if case.decaying() is None:
        reasons.setdefault("decay_exclusions", "it takes no weight_decay")
    return parametrize(OptimizerChecks(case).checks(), reasons)


class OptimizerChecks:
    """The checks of one optimizer; what they find out on two ranks is found out once."""

    def __init__(self, case: OptimizerCase) -> None:
        self.case = case

    def checks(self) -> list[Check]:
        """Every check, in the order in which a fault is best looked for."""
        promises: dict[str, tuple[str, Callable[[], None]]] = {
            "contract": ("it is built from `model` and is a torch optimizer", partial(check_contract, self.case)),
            "each_parameter_once": (
                "it holds each trainable parameter once and no frozen one",
                partial(check_each_parameter_once, self.case),
            ),
            "each_parameter_moves": (
                "a step moves every parameter that has a gradient",
                partial(check_each_parameter_moves, self.case),
            ),
            "missing_gradients": (
                "a parameter without a gradient stays",
                partial(check_missing_gradients, self.case),
            ),
            "zero_gradients": (
                "gradients of zero decay weights as declared and do nothing else",
                partial(check_zero_gradients, self.case),
            ),
            "decay_exclusions": (
                "weight decay leaves norms and biases alone",
                partial(check_decay_exclusions, self.case),
            ),
            "learning_rate": (
                "the rate in param_groups, which schedules write, is the one it uses",
                partial(check_learning_rate, self.case),
            ),
            "no_hidden_step": (
                "building, reading its state and saving move nothing, now or later",
                partial(check_no_hidden_step, self.case),
            ),
            "state_round_trip": (
                "a run that is saved and resumed goes on to the last bit",
                partial(check_state_round_trip, self.case),
            ),
            "sharded_update": ("an update on two ranks is that of one process", self.check_sharded_update),
            "state_on_shards": ("the same after saving and resuming on two ranks", self.check_state_on_shards),
        }
        subject = name_of(self.case.component)
        return [Check(name, subject, promise, function) for name, (promise, function) in promises.items()]

    @cached_property
    def _two_ranks(self) -> RankResults:
        sections = [Section("sharded_update", _updates_of), Section("state_on_shards", _interrupted_on_ranks)]
        with tempfile.TemporaryDirectory() as directory:
            return on_ranks(sections, replace(self.case, directory=directory))

    def check_sharded_update(self) -> None:
        """Two steps with the same gradients, on whole and on sharded parameters."""
        with tiny_setup() as setup:
            wanted = _updates_of(setup, self.case)
        for found in self._two_ranks.of("sharded_update"):
            for name, update in wanted.items():
                difference = float((found[name] - update).norm())
                allowed = self.case.tolerance * float(update.norm())
                require(
                    difference <= allowed,
                    f"the update of {name} is off by {difference:.3g} of {float(update.norm()):.3g}, where "
                    f"{allowed:.3g} is allowed; norms and matrix products need the whole tensor "
                    "(DTensor.full_tensor or redistribute), or the tolerance is too small for how it computes",
                )

    def check_state_on_shards(self) -> None:
        """Save and restore on two ranks."""
        for found, wanted in self._two_ranks.of("state_on_shards"):
            hint = "make state with torch.zeros_like(parameter), which shards it like the parameter"
            require_equal(found, wanted, "after saving and resuming on two ranks", hint)


def check_contract(case: OptimizerCase) -> None:
    """It is built with the keyword `model` and steps."""
    model = case.model()
    optimizer = case.build(model)
    rates = [group.get("lr") for group in optimizer.param_groups]
    wrong = [rate for rate in rates if not isinstance(rate, (float, int, torch.Tensor))]
    require(bool(rates), "it has no param_groups")
    require(not wrong, f"a group of param_groups has the lr {wrong[0] if wrong else None!r}; schedules need a number")
    set_gradients(model, 1)
    optimizer.step()
    finite = [name for name, tensor in weights(model).items() if not tensor.isfinite().all()]
    require(not finite, f"after a step {finite[:1]} is not finite")


def check_each_parameter_once(case: OptimizerCase) -> None:
    """On several families, with all parameters trainable and with a third of them frozen."""
    for family in dict.fromkeys((case.family, *FAMILIES_TRIED)):
        for is_frozen in (False, True):
            model = tiny_model(family)
            for index, parameter in enumerate(model.parameters()):
                parameter.requires_grad_(not (is_frozen and index % 3 == 0))
            frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
            try:
                with warnings.catch_warnings():
                    # torch only warns of a parameter that one group holds twice; it is refused below.
                    warnings.filterwarnings("ignore", "optimizer contains a parameter group with duplicate")
                    optimizer = case.build(model)
                require_each_once(optimizer, model)
            except (HpError, ValueError) as error:
                raise BrokenPromiseError(f"on {family}: {described(error)}") from error
            names = {parameter: name for name, parameter in model.named_parameters()}
            held = {names[parameter] for group in optimizer.param_groups for parameter in group["params"]}
            thawed = sorted(name for name in frozen if model.get_parameter(name).requires_grad)
            require(not thawed, f"on {family}: it makes {thawed[:1]} trainable again; the recipe has frozen it")
            require(not held & frozen, f"on {family}: it holds {sorted(held & frozen)[:1]}, which is frozen")


def check_each_parameter_moves(case: OptimizerCase) -> None:
    """No part is held and forgotten."""
    model = case.model()
    optimizer = case.build(model)
    before = weights(model)
    idle = {parameter for group in optimizer.param_groups if not group["lr"] for parameter in group["params"]}
    set_gradients(model, 1)
    optimizer.step()
    after = weights(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in idle:
            require(not torch.equal(after[name], before[name]), f"a step leaves {name} where it was")


def check_missing_gradients(case: OptimizerCase) -> None:
    """Every second parameter gets no gradient."""
    model = case.model()
    optimizer = case.build(model)
    for seed in (1, 2):
        before = weights(model)
        set_gradients(model, seed)
        without = []
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if index % 2 == seed % 2:
                parameter.grad = None
                without.append(name)
        optimizer.step()
        hint = "leave out parameters whose grad is None"
        require_unmoved(model, before, "a step without its gradient moves", hint, without)


def check_zero_gradients(case: OptimizerCase) -> None:
    """With all gradients zero, each tensor is scaled by one factor: what its group's decay says, or one."""
    model = case.model()
    optimizer = case.build(model)
    before = weights(model)
    set_gradients(model, None)
    optimizer.step()
    after = weights(model)
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter in groups:
            _require_decay(name, before[name], after[name], groups[parameter])


def _require_decay(name: str, before: torch.Tensor, after: torch.Tensor, group: Mapping[str, Any]) -> None:
    declared = float(group.get("weight_decay") or 0.0)
    require(bool(after.isfinite().all()), f"{name} is not finite after it: a division by a norm of zero?")
    if not declared:
        by = float((after - before).abs().max())
        require(torch.equal(after, before), f"it moves {name} by up to {by:.3g}, whose group declares no weight_decay")
        return
    one, other = before.double().flatten(), after.double().flatten()
    factor = float(one @ other / (one @ one))
    off = float((other - factor * one).abs().max())
    require(off <= 1e-6 * float(one.abs().max()), f"it moves {name} by {off:.3g} besides scaling it")
    # A decay that is added to the gradient is looked ahead along as well, with Nesterov's momentum.
    most = float(group["lr"]) * declared * (1 + float(group.get("momentum") or 0.0))
    require(
        1 - 1.001 * most <= factor < 1,
        f"it scales {name} by {factor:.7g}; lr {float(group['lr']):g} and weight_decay {declared:g} make it "
        f"{1 - float(group['lr']) * declared:.7g}",
    )


def check_decay_exclusions(case: OptimizerCase) -> None:
    """With a weight decay and zero gradients, vectors stay bit for bit."""
    decaying = case.decaying()
    if decaying is None:
        return
    for family in dict.fromkeys((case.family, "gpt2")):
        model = replace(decaying, family=family).model()
        optimizer = decaying.build(model)
        before = weights(model)
        set_gradients(model, None)
        optimizer.step()
        vectors = [name for name, parameter in model.named_parameters() if parameter.ndim <= 1]
        hint = "give norms and biases a group of their own with weight_decay 0"
        require_unmoved(model, before, f"on {family}, weight decay moves", hint, vectors)


def check_learning_rate(case: OptimizerCase) -> None:
    """A schedule that sets the rate to zero stops every parameter."""
    model = case.model()
    optimizer = case.build(model)
    LambdaLR(optimizer, lambda _: 0.0)
    before = weights(model)
    take_steps(model, optimizer, (1, 2))
    hint = 'read group["lr"] in step(), and scale weight decay by it too'
    require_unmoved(model, before, "with a learning rate of zero, steps move", hint)
    for still in range(len(optimizer.param_groups)):
        _one_group_stands_still(case, still)


def _one_group_stands_still(case: OptimizerCase, still: int) -> None:
    """Each group has a rate of its own: one that reads the first group's for all moves what should stand still."""
    model = case.model()
    optimizer = case.build(model)
    group = optimizer.param_groups[still]
    group["lr"] = 0.0
    held = {id(parameter) for parameter in group["params"]}
    named = {name: one for name, one in model.named_parameters() if id(one) in held}
    before = {name: one.detach().clone() for name, one in named.items()}
    take_steps(model, optimizer, (1, 2))
    for name, one in named.items():
        moved = not torch.equal(one.detach(), before[name])
        text = f"with a learning rate of zero in its own group, {still}, steps move {name}"
        require(not moved, f"{text}; read the lr of each group in step()")


def check_no_hidden_step(case: OptimizerCase) -> None:
    """Gradients are there all the time, so that any step would show, also in what a later one does."""
    model = case.model()
    before = weights(model)
    set_gradients(model, 1)
    optimizer = case.build(model)
    hint = "only step() may"
    require_unmoved(model, before, "building it moves", hint)

    def ask(what: str, function: Callable[[], object]) -> None:
        function()
        require_unmoved(model, before, f"{what} moves", hint)

    ask("state_dict()", optimizer.state_dict)
    ask("load_state_dict()", lambda: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())))
    ask("saving", lambda: _read_state(model, optimizer))
    ask("zero_grad()", optimizer.zero_grad)
    fresh = case.model()
    take_steps(fresh, case.build(fresh), (1, 2))
    take_steps(model, optimizer, (1, 2))
    what = "after state_dict(), load_state_dict(), saving and zero_grad() the first steps are others:"
    require_equal(weights(model), weights(fresh), what, "they must not count as steps, nor fill its state")


def _read_state(model: nn.Module, optimizer: Optimizer) -> None:
    parts = parts_of(optimizer)
    optimizer_tensors(model, parts)
    optimizer_scalars(model, parts)


def check_state_round_trip(case: OptimizerCase) -> None:
    """Save and restore in one process."""
    with tiny_setup() as setup, tempfile.TemporaryDirectory() as directory:
        found, wanted = interrupted_and_not(replace(case, directory=directory), setup)
    hint = "keep what it remembers in optimizer.state[parameter], as tensors and numbers"
    require_equal(found, wanted, "after saving and resuming", hint)


def _updates_of(setup: DistributedSetup, case: OptimizerCase) -> dict[str, torch.Tensor]:
    model = case.model(setup=setup)
    optimizer = case.build(model)
    before = weights(model)
    take_steps(model, optimizer, (1, 2))
    return {name: tensor - before[name] for name, tensor in weights(model).items()}


def _interrupted_on_ranks(setup: DistributedSetup, case: OptimizerCase) -> tuple[dict[str, Any], dict[str, Any]]:
    return interrupted_and_not(case, setup)
