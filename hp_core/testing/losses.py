"""What a loss promises: the numbers of a step don't depend on how it is cut, and nothing but the loss is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import pytest
import torch
from torch import nn

from hp_core.parallel.fsdp import shard_model
from hp_core.parallel.setup import DistributedSetup
from hp_core.testing.checks import (
    Check,
    RankResults,
    Section,
    described,
    name_of,
    on_ranks,
    parametrize,
    require,
    require_close,
    require_equal,
)
from hp_core.testing.float64 import InFloat64
from hp_core.testing.loss_steps import (
    LossCase,
    Step,
    call,
    engine_step,
    entries_of,
    loss_of,
    micro_batch,
    micro_batches,
    model_inputs_of,
    other_target,
)
from hp_core.testing.loss_targets import check_every_target_counts
from hp_core.testing.models import other_text, take_rows
from hp_core.testing.setups import tiny_setup
from hp_core.testing.watch import contents, copied, stored, untouched
from hp_core.training.built import require_loss_call, require_without_parameters
from hp_core.training.evaluation import evaluating
from hp_core.training.loss import IGNORE_INDEX, BindsModel, PreparesModelInputs, contract_of

SILENT_ROW = 1


def loss_checks(
    component: Callable[..., Any],
    /,
    *,
    family: str = "llama",
    tolerance: float = 1e-5,
    skip: Mapping[str, str] | None = None,
    **arguments: Any,
) -> pytest.MarkDecorator:
    """Run a test function, `def test_loss(check): check()`, once for each promise of a loss.

    Args:
        component: what a recipe names; importable by name, since other processes import it.
        family: the tiny model that computes what the loss gets, one of `hp_core.testing.models.FAMILIES`.
        tolerance: how far numbers may be apart that should be equal, relative to the largest of them.
        skip: why a promise doesn't apply, by its name.
        arguments: the component's recipe arguments.
    """
    return parametrize(LossChecks(LossCase(component, arguments, family, tolerance)).checks(), skip or {})


class LossChecks:
    """The checks of one loss; what they find out on two ranks is found out once."""

    def __init__(self, case: LossCase) -> None:
        self.case = case

    def checks(self) -> list[Check]:
        """Every check, in the order in which a fault is best looked for."""
        promises: dict[str, tuple[str, Callable[[], None]]] = {
            "contract": (
                "forward(model_output=, labels=) gives a scalar tensor or a dict of them, with a gradient",
                partial(check_contract, self.case),
            ),
            "model_hooks": (
                "bind_model leaves the model alone, prepare_model_inputs gives what the model takes",
                partial(check_model_hooks, self.case),
            ),
            "token_weighting": (
                "loss and gradients of a step don't depend on its micro-batches",
                partial(check_token_weighting, self.case),
            ),
            "ignored_tokens": (
                "labels that are ignored add exactly nothing, also where a micro-batch has no others",
                partial(check_ignored_tokens, self.case),
            ),
            "labels_shifted_once": (
                "labels[t] is the target of position t already",
                partial(check_labels_shifted_once, self.case),
            ),
            "every_target_counts": (
                "another target, at any position, is another loss, and so is another column",
                partial(check_every_target_counts, self.case),
            ),
            "gradients": ("the gradient is the derivative", partial(check_gradients, self.case)),
            "inputs_untouched": ("what the loss is given stays as it is", partial(check_inputs_untouched, self.case)),
            "state": ("state_dict holds everything that the next loss depends on", partial(check_state, self.case)),
            "evaluation": (
                "it can be evaluated without gradients, and that leaves no trace",
                partial(check_evaluation, self.case),
            ),
            "two_ranks": ("loss and gradients under FSDP2 on two ranks are those of one process", self.check_two_ranks),
            "silent_rank": ("a rank without targets adds nothing and holds nobody up", self.check_silent_rank),
        }
        subject = name_of(self.case.component)
        return [Check(name, subject, promise, function) for name, (promise, function) in promises.items()]

    @cached_property
    def _two_ranks(self) -> RankResults:
        return on_ranks([Section("two_ranks", _rows_apart), Section("silent_rank", _one_rank_silent)], self.case)

    def check_two_ranks(self) -> None:
        """Compare both ranks, with one and two micro-batches each, with one process."""
        alone = _alone(self.case, silent=())
        for by_count in self._two_ranks.of("two_ranks"):
            for count, step in by_count.items():
                how = f"with {count} micro-batch{'es' * (count > 1)} on each of two ranks"
                _compare(step, alone, self.case.tolerance, how)

    def check_silent_rank(self) -> None:
        """Compare two ranks, one of which has no target, with one process."""
        alone = _alone(self.case, silent=(2, 3))
        for step in self._two_ranks.of("silent_rank"):
            _compare(step, alone, self.case.tolerance, "with all targets on one of two ranks")


def check_contract(case: LossCase) -> None:
    """The loss can be called as the engine does it, and what it returns can be trained on."""
    with tiny_setup() as setup:
        model = case.model()
        loss_fn = case.bound(model, setup)
        contract = contract_of(loss_fn)
        require_loss_call(loss_fn, contract.columns)
        require_without_parameters(case.build())
        one = micro_batch(case.batch(), contract)
        entries = entries_of(loss_fn, model(**model_inputs_of(loss_fn, one)), one)
        for name, value in entries.items():
            require(bool(value.isfinite().all()), f"{name} is {value.detach().tolist()}")
            require(value.is_floating_point(), f"{name} has the dtype {value.dtype}; return a floating-point tensor")
            require(
                value.requires_grad or name in contract.diagnostics,
                f"{name} has no gradient: it was detached, or made of numbers instead of tensors; an entry that is "
                f"only to be logged belongs in diagnostics = ({name!r},)",
            )


def check_model_hooks(case: LossCase) -> None:
    """`bind_model` and `prepare_model_inputs`, where the loss has them."""
    with tiny_setup() as setup:
        model = case.model()
        before = contents(model)
        loss_fn = case.build()
        if isinstance(loss_fn, BindsModel):
            loss_fn.bind_model(model=model, distributed_setup=setup)
            require_equal(contents(model), before, "after bind_model the model", "bind_model may only look")
        one = micro_batch(case.batch(), contract_of(loss_fn))
        if isinstance(loss_fn, PreparesModelInputs):
            prepared = model_inputs_of(loss_fn, one)
            require("input_ids" in prepared, "prepare_model_inputs drops 'input_ids', which the model needs")
            try:
                model(**prepared)
            except Exception as error:
                text = f"the model can't be called with what prepare_model_inputs returns: {described(error)}"
                require(False, text)
            kept = "position_ids" in prepared or "position_ids" not in one.model_inputs
            require(kept, "prepare_model_inputs drops 'position_ids', which tell packed documents apart")
            require_equal(contents(model), before, "after prepare_model_inputs the model", "it may only look")


def check_token_weighting(case: LossCase) -> None:
    """One, two and four micro-batches give the same loss and gradients."""
    with tiny_setup() as setup:
        model, batch = case.model(), case.batch()
        steps = {count: _step(case, model, batch, count, setup) for count in (1, 2, 4)}
        for count in (2, 4):
            _compare(steps[count], steps[1], case.tolerance, f"with {count} micro-batches")


def check_ignored_tokens(case: LossCase) -> None:
    """A row without targets changes nothing, beside others or in a micro-batch of its own."""
    with tiny_setup() as setup:
        model, batch = case.model(), case.batch(silent=[SILENT_ROW])
        rows = [take_rows(batch, row, row + 1) for row in range(4) if row != SILENT_ROW]
        others = {name: torch.cat([row[name] for row in rows]) for name in batch}
        for size, where in ((4, "beside others"), (1, "in a micro-batch of its own")):
            found = _step(case, model, batch, 4 // size, setup)
            wanted = _step(case, model, others, max(1, 3 // size), setup)
            _compare(found, wanted, case.tolerance, f"with a row without targets {where}")


def check_labels_shifted_once(case: LossCase) -> None:
    """The first label counts, and it belongs to the first position's logits: later tokens have no part in it."""
    with tiny_setup() as setup:
        model, batch = case.model(), case.batch()
        contract = contract_of(case.build())
        columns = contract.columns
        only_first = torch.full_like(batch["labels"], IGNORE_INDEX)
        only_first[:, 0] = other_target(batch["input_ids"][:, 0], contract)
        first = {**batch, "labels": only_first}
        for name in columns:
            if name.endswith("_labels"):
                first[name] = only_first.clone()

        def value(one: Mapping[str, torch.Tensor]) -> float:
            return float(loss_of(model, case.bound(model, setup), one).detach())

        loss = value(first)
        hint = "labels arrive shifted, so logits[:, t] belongs to labels[:, t]; don't shift them again"
        other = {**first, "labels": other_target(only_first, contract)}
        require(
            abs(value(other) - loss) > case.tolerance * abs(loss),
            f"another target of the first position gives the same loss, {loss:.6g}; {hint}",
        )
        later = batch["input_ids"].clone()
        later[:, 1:] = other_text(later[:, 1:])
        found = value({**first, "input_ids": later})
        require(
            abs(found - loss) <= case.tolerance * abs(loss),
            f"the loss of the first position alone changes with the tokens after it, from {loss:.6g} to {found:.6g}; "
            f"{hint}",
        )


def check_gradients(case: LossCase) -> None:
    """In float64, the change of the loss along a direction of each parameter is what the gradient says."""
    with tiny_setup() as setup:
        model, batch = case.model(torch.float64), case.batch()
        # Bound before any weight is moved, as in a run, and one for each call, since a loss may remember.
        trainable = sum(parameter.requires_grad for parameter in model.parameters())
        losses = iter([_in_float64(case.bound(model, setup)) for _ in range(1 + 2 * trainable)])
        generator = torch.Generator().manual_seed(0)

        def loss() -> torch.Tensor:
            with InFloat64():
                return loss_of(model, next(losses), batch).double()

        torch.manual_seed(0)
        loss().backward()
        told: dict[str, torch.Tensor] = {}
        measured: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            way = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            way /= way.norm()
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            told[name] = (gradient * way).sum()
            measured[name] = _slope(loss, parameter, way)
        hint = "a part of the loss is detached, or a backward of its own is wrong"
        require(max(float(one.abs()) for one in measured.values()) > 0, f"the loss doesn't depend on the model; {hint}")
        require_close(told, measured, 1e-5, "the derivative along a direction", hint)


def _in_float64(loss_fn: nn.Module) -> nn.Module:
    """Weights of classes and the like meet logits of float64."""
    for module in loss_fn.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.double()
    return loss_fn


@torch.no_grad()
def _slope(loss: Callable[[], torch.Tensor], parameter: nn.Parameter, way: torch.Tensor) -> torch.Tensor:
    values = []
    start = parameter.detach().clone()
    for sign in (1, -1):
        parameter.copy_(start + sign * _STEP * way)
        torch.manual_seed(0)
        with torch.enable_grad():
            values.append(loss().detach())
    parameter.copy_(start)
    return (values[0] - values[1]) / (2 * _STEP)


_STEP = 1e-4


def check_inputs_untouched(case: LossCase) -> None:
    """Neither the loss nor `prepare_model_inputs` changes what it is given."""
    with tiny_setup() as setup:
        model = case.model()
        loss_fn = case.bound(model, setup)
        one = micro_batch(case.batch(), contract_of(loss_fn))
        for what, given in (("model_inputs", one.model_inputs), ("loss_inputs", one.loss_inputs)):
            with untouched(f"prepare_model_inputs changes {what}", given):
                prepared = model_inputs_of(loss_fn, one)
        outputs = model(**prepared)
        before = contents(model)
        with untouched("the loss changes model_output", outputs), untouched("the loss changes", one.loss_inputs):
            call(loss_fn, outputs, one.loss_inputs)
        require_equal(contents(model), before, "after the loss the model", "only backward() may write gradients")


def check_state(case: LossCase) -> None:
    """A loss built anew, with the state of one that has seen two micro-batches, goes on as that one does."""
    with tiny_setup() as setup:
        model = case.model()

        def values(loss_fn: nn.Module, numbers: range) -> dict[str, torch.Tensor]:
            found: dict[str, torch.Tensor] = {}
            for number in numbers:
                torch.manual_seed(number)
                part = micro_batch(case.batch(seed=number), contract_of(loss_fn))
                entries = entries_of(loss_fn, model(**model_inputs_of(loss_fn, part)), part)
                found |= {f"{name} of micro-batch {number}": value.detach() for name, value in entries.items()}
            return found

        first = case.bound(model, setup)
        values(first, range(2))
        state = stored(first.state_dict())
        wanted = values(first, range(2, 4))
        second = case.bound(model, setup)
        second.load_state_dict(state)
        hint = "keep what it remembers in buffers (register_buffer), which state_dict holds"
        require_equal(values(second, range(2, 4)), wanted, "after state_dict and load_state_dict", hint)


def check_evaluation(case: LossCase) -> None:
    """The loss works without gradients in evaluation mode, and remembers nothing of it."""
    with tiny_setup() as setup:
        model = case.model()
        loss_fn = case.bound(model, setup)
        one = micro_batch(case.batch(), contract_of(loss_fn))
        before = copied(loss_fn.state_dict())
        with evaluating(model, loss_fn):
            entries = entries_of(loss_fn, model(**model_inputs_of(loss_fn, one)), one)
        for name, value in entries.items():
            require(bool(value.isfinite().all()), f"{name} is {value.detach().tolist()} in evaluation")
        hint = "update what it remembers only while self.training"
        require_equal(copied(loss_fn.state_dict()), before, "an evaluation changes the loss's state", hint)


# What the checks are made of.


def _step(
    case: LossCase, model: nn.Module, batch: Mapping[str, torch.Tensor], count: int, setup: DistributedSetup
) -> Step:
    loss_fn = case.bound(model, setup)
    return engine_step(model, loss_fn, micro_batches(batch, count, contract_of(loss_fn)), setup)


def _alone(case: LossCase, silent: tuple[int, ...]) -> Step:
    with tiny_setup() as setup:
        return _step(case, case.model(), case.batch(silent=silent), 1, setup)


def _rows_apart(setup: DistributedSetup, case: LossCase) -> dict[int, Step]:
    model = _sharded(case, setup)
    own = take_rows(case.batch(), 2 * setup.rank, 2 * setup.rank + 2)
    return {count: _step(case, model, own, count, setup) for count in (1, 2)}


def _one_rank_silent(setup: DistributedSetup, case: LossCase) -> Step:
    own = take_rows(case.batch(silent=(2, 3)), 2 * setup.rank, 2 * setup.rank + 2)
    return _step(case, _sharded(case, setup), own, 1, setup)


def _sharded(case: LossCase, setup: DistributedSetup) -> nn.Module:
    model = case.model()
    shard_model(model, setup)
    return model


def _compare(found: Step, wanted: Step, tolerance: float, how: str) -> None:
    difference = abs(found.loss - wanted.loss)
    hint = (
        "divide by the number of labels that aren't -100 where `reduction` is 'mean', by nothing where it is 'sum', "
        "and leave out what belongs to ignored labels"
    )
    require(
        difference <= tolerance * max(abs(wanted.loss), 1e-30),
        f"{how} the loss is {found.loss:.7g} instead of {wanted.loss:.7g}; {hint}",
    )
    require_close(found.gradients, wanted.gradients, tolerance, f"{how} the gradient", hint)
