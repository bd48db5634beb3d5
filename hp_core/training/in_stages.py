"""What makes micro-batches fit a pipeline, and gives what is trained in earlier stages its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hp_core.data.protocols import EMPTY_ROW, IGNORED_LABEL
from hp_core.errors import RunError
from hp_core.parallel.context.sequence import padded
from hp_core.training.accounting import MicroBatch

Inputs = tuple[dict[str, Any], dict[str, Any]]


def filled_up(micro_batches: Sequence[MicroBatch], number: int) -> list[MicroBatch]:
    """The micro-batches, and as many silent ones as are missing from what a schedule takes."""
    return [*micro_batches, *[_silent(micro_batches[-1])] * (number - len(micro_batches))]


def tokens_of(micro_batches: Sequence[MicroBatch]) -> torch.Size:
    """The shape of the micro-batches' labels, (rows, tokens).

    Raises:
        RunError: they differ, and hidden states of one shape travel through the schedule.
    """
    shapes: set[torch.Size] = {one.loss_inputs["labels"].shape for one in micro_batches}
    if len(shapes) > 1:
        found = " and ".join(str(tuple(shape)) for shape in sorted(shapes))
        raise RunError(f"pipeline ranks need micro-batches of one shape in a step, and these have {found}")
    return shapes.pop()


def of_one_length(inputs: Sequence[Inputs]) -> list[Inputs]:
    """Model and loss inputs of a step with their rows padded to one length, as documents of their own.

    The longest is rounded up by a sixteenth at most (or to 8): each length has a schedule, and few of them are kept.
    """
    lengths = [loss_inputs["labels"].shape[1] for _, loss_inputs in inputs]
    granule = max(8, (1 << max(lengths).bit_length()) // 32)
    length = -(-max(lengths) // granule) * granule
    return [padded(*one, length - own) for one, own in zip(inputs, lengths, strict=True)]


def with_gradient_of(hidden: torch.Tensor, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Hidden states from which the backward pass also starts into `terms`, as if they were added to the loss."""
    # The model may give a slice, and torch detaches in place what a stage gives, which no view can be.
    hidden = hidden.clone()
    if not terms:
        return hidden
    carried: torch.Tensor = _WithGradientOf.apply(hidden, torch.stack(list(terms)).sum())  # type: ignore[no-untyped-call]
    return carried


class _WithGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.ones_like(term))
        ctx.mark_dirty(hidden)
        return hidden

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (one,) = ctx.saved_tensors
        return outer[0], one


def _silent(like: MicroBatch) -> MicroBatch:
    labels = {name: torch.full_like(one, IGNORED_LABEL) for name, one in _labels(like.loss_inputs).items()}
    in_model = {name: torch.full_like(one, IGNORED_LABEL) for name, one in _labels(like.model_inputs).items()}
    return replace(
        like,
        model_inputs={**like.model_inputs, **in_model},
        loss_inputs={**like.loss_inputs, **labels},
        targets=dict.fromkeys(like.targets, 0),
        amounts=dict.fromkeys(like.amounts, 0.0),
        rows={name: torch.zeros_like(one) for name, one in like.rows.items()},
        real_tokens=torch.zeros_like(like.real_tokens),
        sample_ids=(EMPTY_ROW,) * len(like.sample_ids),
    )


def _labels(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: one for name, one in inputs.items() if name == "labels" or name.endswith("_labels")}
