"""The forward and backward passes of one step, over its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hp_core.errors import RunError, noting
from hp_core.parallel.agreement import gathered
from hp_core.parallel.fsdp import reshard, set_gradient_sync
from hp_core.parallel.pipeline.runner import Pipeline, pipeline_of
from hp_core.parallel.pipeline.stages import Stage
from hp_core.parallel.setup import DistributedSetup
from hp_core.training.accounting import MicroBatch, StepLoss
from hp_core.training.in_stages import filled_up, tokens_of, with_gradient_of
from hp_core.training.loss import HasStepTerms, HasTermsInStages
from hp_core.training.state import random_state, restore_random_state

Statistics = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Entries:
    """The names of what a loss gives: those of this rank's stages, and those of all."""

    own: tuple[str, ...] = ()
    all: tuple[str, ...] = ()


def require_same_entries(step_loss: StepLoss, known: Entries, setup: DistributedSetup) -> Entries:
    """The names of what a loss gives, which must be those of every step and rank: logged rows are added up by place.

    Args:
        step_loss: a step's, after all its passes; it is given a zero for what only other stages have.
        known: what an earlier step gave; empty in the first, where the ranks compare.
        setup: the run's ranks.

    Raises:
        RunError: this step or another rank gave others.
    """
    own = tuple(sorted(step_loss.logged))
    if known.all:
        expected = [known.own]
        everything = known.all
    else:
        by_rank = gathered((setup.axis_rank("pp"), own), setup)
        expected = [names for stage, names in by_rank if stage == setup.axis_rank("pp")]
        everything = tuple(sorted({name for _, names in by_rank for name in names}))
    for other in expected:
        if own != other:
            raise RunError(
                f"loss_fn: returned the entries {', '.join(own)}, and elsewhere {', '.join(other)}; return all of "
                "them each time, with 0 where there is nothing"
            )
    step_loss.fill(everything)
    return Entries(own, everything)


@dataclass(frozen=True, eq=False)
class Forward:
    """What a forward pass gave: the model's output and the loss's inputs.

    With pipeline ranks it is `is_whole` in the last stage alone; the output of another has hidden states for logits.
    """

    outputs: Any
    loss_inputs: dict[str, Any]
    is_whole: bool = True


@dataclass(frozen=True)
class Passes:
    """How a micro-batch goes through the model and the loss.

    `forward` gives the model's output and the loss's inputs; `loss` takes both, and gives what the loss returned.
    """

    model: nn.Module
    loss_fn: nn.Module
    forward: Callable[[MicroBatch], tuple[Any, dict[str, Any]]]
    loss: Callable[[Any, dict[str, Any]], Any]

    def run_forward(self, micro_batches: Iterable[MicroBatch], use: Callable[[MicroBatch, Forward], None]) -> None:
        """Run micro-batches forward and hand each pass on; with pipeline ranks, those of this rank's stages."""
        pipeline = pipeline_of(self.model)
        if pipeline is None:
            for micro_batch in micro_batches:
                use(micro_batch, Forward(*self.forward(micro_batch)))
            return

        def compute(stage: Stage, micro_batch: MicroBatch) -> torch.Tensor:
            found = Forward(*self.forward(micro_batch), is_whole=stage.is_last)
            use(micro_batch, found)
            hidden: torch.Tensor = found.outputs.logits
            return hidden

        pipeline.run_forward(micro_batches, compute)


def accumulate_gradients(
    micro_batches: Sequence[MicroBatch], passes: Passes, step_loss: StepLoss, setup: DistributedSetup
) -> None:
    """Add the gradients of a whole step to the model's parameters, and its loss to `step_loss`. Every rank calls it."""
    terms = _Terms(passes, step_loss, setup)
    pipeline = pipeline_of(passes.model)
    if len(micro_batches) > 1 or pipeline is not None:
        terms.look_ahead(micro_batches)
    if pipeline is not None:
        _accumulate_in_stages(pipeline, micro_batches, passes, step_loss, terms)
        return
    for index, micro_batch in enumerate(micro_batches):
        set_gradient_sync(passes.model, index == len(micro_batches) - 1)
        with noting(micro_batch.told):
            outputs, loss_inputs = passes.forward(micro_batch)
            loss = passes.loss(outputs, loss_inputs)
            step_loss.weigh(loss, outputs, micro_batch, terms.of(micro_batch, outputs)).backward()
        del loss, outputs


def _accumulate_in_stages(
    pipeline: Pipeline, micro_batches: Sequence[MicroBatch], passes: Passes, step_loss: StepLoss, terms: _Terms
) -> None:
    def compute(stage: Stage, micro_batch: MicroBatch) -> torch.Tensor:
        with noting(micro_batch.told):
            outputs, loss_inputs = passes.forward(micro_batch)
            shares = terms.of(micro_batch, outputs, is_whole=stage.is_last)
            if not stage.is_last:
                return with_gradient_of(outputs.logits, step_loss.add_terms_alone(shares))
            return step_loss.weigh(passes.loss(outputs, loss_inputs), outputs, micro_batch, shares)

    jobs = filled_up(micro_batches, pipeline.num_taken(len(micro_batches)))
    pipeline.train(jobs, tokens_of(jobs), compute)


class _Terms:
    """What of the loss depends on the whole step, if anything does."""

    def __init__(self, passes: Passes, step_loss: StepLoss, setup: DistributedSetup) -> None:
        self._passes = passes
        self._counts = step_loss.counts
        self._setup = setup
        self._statistics: Statistics | None = None
        self._in_stages = isinstance(passes.loss_fn, HasTermsInStages) and passes.loss_fn.terms_in_stages

    def look_ahead(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Run every micro-batch forward once, for the statistics alone.

        The random numbers start over afterwards, so the passes with gradients see the same dropout.
        """
        loss_fn = self._passes.loss_fn
        if not (isinstance(loss_fn, HasStepTerms) and loss_fn.needs_statistics):
            return
        random, found = random_state(), []

        def look(micro_batch: MicroBatch, one: Forward) -> None:
            if one.is_whole or self._in_stages:
                found.append(self._own_statistics(loss_fn, micro_batch, one.outputs))

        with torch.no_grad():
            self._passes.run_forward(micro_batches, look)
        reshard(self._passes.model)
        restore_random_state(random)
        self._statistics = self._summed(found)

    def of(self, micro_batch: MicroBatch, outputs: Any, *, is_whole: bool = True) -> dict[str, torch.Tensor]:
        """The micro-batch's shares of the terms; before the last stage, if the loss says that it has any there."""
        loss_fn = self._passes.loss_fn
        if not isinstance(loss_fn, HasStepTerms) or not (is_whole or self._in_stages):
            return {}
        if self._statistics is None and loss_fn.needs_statistics:
            self._statistics = self._summed([self._own_statistics(loss_fn, micro_batch, outputs)])
        return loss_fn.step_terms(
            model_output=outputs,
            real_tokens=self._on_device(micro_batch.real_tokens),
            num_real_tokens=self._counts.real_tokens,
            statistics=self._statistics or {},
        )

    @torch.no_grad()
    def _own_statistics(self, loss_fn: HasStepTerms, micro_batch: MicroBatch, outputs: Any) -> Statistics:
        real_tokens = self._on_device(micro_batch.real_tokens)
        return loss_fn.step_statistics(model_output=outputs, real_tokens=real_tokens)

    def _summed(self, found: Sequence[Mapping[str, torch.Tensor]]) -> Statistics:
        own = {name: torch.stack([one[name].double() for one in found]).sum(0) for name in (found[0] if found else {})}
        shapes = {name: tuple(one.shape) for name, one in own.items()}
        if self._setup.sizes.pp > 1:
            # A stage may have no part in them, and gives zeros.
            shapes = {name: shape for one in gathered(shapes, self._setup) for name, shape in one.items()}
        names = sorted(shapes)
        zeros = {name: torch.zeros(shapes[name], dtype=torch.float64, device=self._setup.device) for name in names}
        summed = self._setup.sum_tensors([own.get(name, zeros[name]) for name in names])
        return dict(zip(names, summed, strict=True))

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._setup.device, non_blocking=True)
