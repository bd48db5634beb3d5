"""The loss protocol as the engine sees it, and the default loss: what the model computes itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from hp_core.data.columns import RESERVED
from hp_core.errors import InputError, Problem

IGNORE_INDEX = -100

Reduction = Literal["mean", "sum"]


@runtime_checkable
class DeclaresReduction(Protocol):
    """A loss that says how it reduces: `mean` over its supervised tokens (assumed of any other loss) or `sum`."""

    reduction: str


@runtime_checkable
class DeclaresColumns(Protocol):
    """A loss whose `forward` takes arrays of the rows beside the labels, as keyword arguments of these names.

    A loss that wraps another one declares what it takes itself, and hands on what the other one needs.
    """

    columns: Sequence[str]


@runtime_checkable
class PreparesModelInputs(Protocol):
    """A loss that changes what the model is called with, every micro-batch."""

    def prepare_model_inputs(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments for the model."""
        ...


@runtime_checkable
class BindsModel(Protocol):
    """A loss that wants to see the finished model once."""

    def bind_model(self, model: nn.Module, distributed_setup: Any) -> None:
        """Called once, after the model is final."""
        ...


def reduction_of(loss_fn: nn.Module) -> Reduction:
    """How `loss_fn` reduces over tokens.

    Raises:
        ValueError: it declares a reduction the engine can't make exact.
    """
    declared = loss_fn.reduction if isinstance(loss_fn, DeclaresReduction) else "mean"
    if declared == "mean":
        return "mean"
    if declared == "sum":
        return "sum"
    raise ValueError(f"{type(loss_fn).__name__}.reduction is {declared!r}; a loss declares 'mean' or 'sum'")


def columns_of(loss_fn: nn.Module) -> tuple[str, ...]:
    """The columns that `loss_fn` takes beside `model_output` and `labels`; none unless it declares them.

    Raises:
        InputError: it declares something else than distinct names of keyword arguments of its `forward`.
    """
    if not isinstance(loss_fn, DeclaresColumns):
        return ()
    declared: object = loss_fn.columns
    names = tuple(declared) if isinstance(declared, (tuple, list)) else ()
    loss, hint = type(loss_fn).__name__, ""
    parameters = inspect.signature(loss_fn.forward).parameters
    is_open = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    takes = {name for name, one in parameters.items() if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)}
    if not isinstance(declared, (tuple, list)) or not all(isinstance(name, str) and name for name in names):
        message, hint = f"{loss}.columns is {declared!r}, not a tuple of names", 'write columns = ("weights",)'
    elif len(set(names)) != len(names):
        message = f"{loss}.columns names one twice: {', '.join(names)}"
    elif taken := [name for name in names if name in RESERVED]:
        message = f"{loss}.columns names {taken[0]!r}, which is no column"
        hint = "columns are arrays that a dataset adds to its rows, beside input_ids, labels and position_ids"
    elif strange := [name for name in names if not is_open and name not in takes]:
        message = f"{loss} declares the column {strange[0]!r}, which its forward does not take"
        hint = f"write def forward(self, *, model_output, labels, {', '.join(names)})"
    else:
        return names
    raise InputError(Problem(message, path="loss_fn", hint=hint))


class ModelOutputLoss(nn.Module):
    """The loss that the model itself returns as `model_output.loss`: a mean over its supervised tokens."""

    reduction = "mean"

    def forward(self, *, model_output: Any, labels: torch.Tensor | None) -> torch.Tensor:
        """Return `model_output.loss`, a scalar.

        Raises:
            ValueError: the model returned no loss.
        """
        del labels
        loss = model_output.loss
        if loss is None:
            raise ValueError("model_output.loss is None: this model computes no loss, so the recipe needs a loss_fn")
        return loss  # type: ignore[no-any-return]


def num_targets(loss_inputs: Mapping[str, Any]) -> dict[str, int]:
    """Supervised tokens of a micro-batch for each label tensor (`labels`, and any `*_labels`), counted on the host."""
    return {
        name: int((value != IGNORE_INDEX).sum())
        for name, value in sorted(loss_inputs.items())
        if (name == "labels" or name.endswith("_labels")) and isinstance(value, torch.Tensor)
    }
