"""The loss protocol as the engine sees it, and the default loss: what the model computes itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from hp_core.data.columns import RESERVED
from hp_core.errors import InputError, Problem

IGNORE_INDEX = -100

Reduction = Literal["mean", "sum", "sample"]


@runtime_checkable
class DeclaresReduction(Protocol):
    """A loss that says how it reduces.

    `mean` over the micro-batch's supervised tokens (assumed of any other loss), their `sum`, or `sample`: a value for
    each row, whose mean over the rows with a target is the loss of the step.
    """

    reduction: str


@runtime_checkable
class DeclaresColumns(Protocol):
    """A loss whose `forward` takes arrays of the rows beside the labels, as keyword arguments of these names.

    A loss that wraps another one declares what it takes itself, and hands on what the other one needs.
    """

    columns: Sequence[str]


@runtime_checkable
class WeighsTokens(Protocol):
    """A loss that multiplies each token's loss by one of its columns.

    The step is then normalised by the weights of the supervised tokens instead of their number: a mean is
    `sum(w * l) / sum(w)`, a sum `sum(w * l)`.
    """

    weight_column: str | None


@runtime_checkable
class IgnoresLabel(Protocol):
    """A loss to which labels of this value are no targets; -100 never is one."""

    ignore_index: int


@runtime_checkable
class DeclaresDiagnostics(Protocol):
    """A loss that returns a dict some of whose entries are only logged: they are no part of what is trained."""

    diagnostics: Sequence[str]


@runtime_checkable
class HasStepTerms(Protocol):
    """A loss with terms that depend on all tokens of a step at once, such as the balance of a router's load.

    `needs_statistics` says whether `step_statistics` is to be called. If it is, a step of several micro-batches runs
    each of them forward twice: once for the statistics, without gradients, and once for the gradients.
    """

    @property
    def needs_statistics(self) -> bool:
        """Whether the terms depend on what `step_statistics` finds."""
        ...

    def step_statistics(self, *, model_output: Any, real_tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is to be summed over the micro-batches and ranks of a step, after a forward pass.

        Args:
            model_output: what the model returned.
            real_tokens: bool, (rows, tokens); False on padding.
        """
        ...

    def step_terms(
        self,
        *,
        model_output: Any,
        real_tokens: torch.Tensor,
        num_real_tokens: int,
        statistics: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """This micro-batch's share of each term, by name: scalars whose sum over the step is the term.

        Args:
            model_output: what the model returned.
            real_tokens: bool, (rows, tokens); False on padding.
            num_real_tokens: those of the whole step.
            statistics: the sums over the step, in float64; empty unless `needs_statistics`.
        """
        ...


@runtime_checkable
class NamesStepTerms(Protocol):
    """A loss that says which terms `step_terms` can give, so that a metric's name can be checked before the first."""

    step_term_names: Sequence[str]


@runtime_checkable
class HasTermsInStages(Protocol):
    """A loss with step terms of all stages of a pipeline, such as those of the routers in any layer.

    Its `step_statistics` and `step_terms` are called in every stage, where `model_output` has hidden states for
    logits; those of other losses in the last one alone.
    """

    @property
    def terms_in_stages(self) -> bool:
        """Whether it does."""
        ...


@runtime_checkable
class ComputesOnShards(Protocol):
    """A loss that knows how to ask for, and read, the logits of a rank's part of the vocabulary."""

    @property
    def on_vocabulary_shards(self) -> bool:
        """Whether it does."""
        ...


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


@dataclass(frozen=True)
class LossContract:
    """What a loss declares about itself: how it reduces, what it is given, and what counts."""

    reduction: Reduction = "mean"
    columns: tuple[str, ...] = ()
    weight_column: str | None = None
    ignore_index: int = IGNORE_INDEX
    diagnostics: tuple[str, ...] = ()

    def is_target(self, labels: torch.Tensor) -> torch.Tensor:
        """Which labels are targets, as a bool tensor of their shape."""
        return (labels != IGNORE_INDEX) & (labels != self.ignore_index)

    def reduced(
        self, values: torch.Tensor, labels: torch.Tensor, columns: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """What a loss returns for these losses of single tokens, by its reduction and weights.

        Args:
            values: (rows, tokens); anything where the label is no target.
            labels: (rows, tokens).
            columns: the loss's columns, among them the weights if it has any.

        Returns:
            A scalar, or for `sample` the mean of each row, (rows,). Where nothing counts it is 0 with zero gradients.
        """
        is_target = self.is_target(labels)
        nothing = torch.zeros_like(values)
        weights = is_target.to(values.dtype)
        if self.weight_column is not None:
            weights = torch.where(is_target, (columns or {})[self.weight_column].to(values.dtype), nothing)
        weighted = torch.where(is_target, values, nothing) * weights
        if self.reduction == "sum":
            return weighted.sum()
        axes = (-1,) if self.reduction == "sample" else tuple(range(weights.dim()))
        amount = weights.sum(axes)
        return weighted.sum(axes) / torch.where(amount > 0, amount, torch.ones_like(amount))


def contract_of(loss_fn: nn.Module) -> LossContract:
    """What `loss_fn` declares.

    Raises:
        InputError: it declares something that the engine can't keep.
    """
    columns = columns_of(loss_fn)
    weight_column: object = loss_fn.weight_column if isinstance(loss_fn, WeighsTokens) else None
    if weight_column is not None and weight_column not in columns:
        declared = ", ".join(columns) or "none"
        message = f"{_name(loss_fn)}.weight_column is {weight_column!r}, which is none of its columns ({declared})"
        raise _refused(message, f"write columns = ({weight_column!r},)")
    if isinstance(weight_column, str) and weight_column.endswith("_labels"):
        raise _refused(f"{_name(loss_fn)}.weight_column is {weight_column!r}, but `…_labels` are targets")
    ignore_index: object = loss_fn.ignore_index if isinstance(loss_fn, IgnoresLabel) else IGNORE_INDEX
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        raise _refused(f"{_name(loss_fn)}.ignore_index is {ignore_index!r}, not a whole number")
    return LossContract(
        reduction=reduction_of(loss_fn),
        columns=columns,
        weight_column=weight_column if isinstance(weight_column, str) else None,
        ignore_index=ignore_index,
        diagnostics=_diagnostics(loss_fn),
    )


def reduction_of(loss_fn: nn.Module) -> Reduction:
    """How `loss_fn` reduces.

    Raises:
        InputError: it declares a reduction the engine can't make exact.
    """
    declared: object = loss_fn.reduction if isinstance(loss_fn, DeclaresReduction) else "mean"
    if declared == "mean":
        return "mean"
    if declared == "sum":
        return "sum"
    if declared == "sample":
        return "sample"
    raise _refused(f"{_name(loss_fn)}.reduction is {declared!r}; a loss declares 'mean', 'sum' or 'sample'")


def columns_of(loss_fn: nn.Module) -> tuple[str, ...]:
    """The columns that `loss_fn` takes beside `model_output` and `labels`; none unless it declares them.

    Raises:
        InputError: it declares something else than distinct names of keyword arguments of its `forward`.
    """
    if not isinstance(loss_fn, DeclaresColumns):
        return ()
    names = _names(loss_fn, "columns", loss_fn.columns, 'write columns = ("weights",)')
    parameters = inspect.signature(loss_fn.forward).parameters
    is_open = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    takes = {name for name, one in parameters.items() if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)}
    if taken := [name for name in names if name in RESERVED]:
        hint = "columns are arrays that a dataset adds to its rows, beside input_ids, labels and position_ids"
        raise _refused(f"{_name(loss_fn)}.columns names {taken[0]!r}, which is no column", hint)
    if strange := [name for name in names if not is_open and name not in takes]:
        message = f"{_name(loss_fn)} declares the column {strange[0]!r}, which its forward does not take"
        raise _refused(message, f"write def forward(self, *, model_output, labels, {', '.join(names)})")
    return names


def _diagnostics(loss_fn: nn.Module) -> tuple[str, ...]:
    if not isinstance(loss_fn, DeclaresDiagnostics):
        return ()
    return _names(loss_fn, "diagnostics", loss_fn.diagnostics, 'write diagnostics = ("accuracy",)')


def _names(loss_fn: nn.Module, attribute: str, declared: object, hint: str) -> tuple[str, ...]:
    names = tuple(declared) if isinstance(declared, (tuple, list)) else ()
    if not isinstance(declared, (tuple, list)) or not all(isinstance(name, str) and name for name in names):
        raise _refused(f"{_name(loss_fn)}.{attribute} is {declared!r}, not a tuple of names", hint)
    if len(set(names)) != len(names):
        raise _refused(f"{_name(loss_fn)}.{attribute} names one twice: {', '.join(names)}")
    return names


def _name(loss_fn: nn.Module) -> str:
    return type(loss_fn).__name__


def _refused(message: str, hint: str = "") -> InputError:
    return InputError(Problem(message, path="loss_fn", hint=hint))


@runtime_checkable
class _HasConfig(Protocol):
    """A model of transformers."""

    config: Any


@runtime_checkable
class _HasTextConfig(Protocol):
    """A configuration of transformers, which of a vision-language model has a part for its text."""

    def get_text_config(self) -> Any:
        """Return the configuration of the text model."""
        ...


@runtime_checkable
class _AddsRouterLoss(Protocol):
    """The configuration of a mixture of experts whose model adds a loss for the balance of its routers."""

    output_router_logits: bool
    router_aux_loss_coef: float


class ModelOutputLoss(nn.Module):
    """The loss that the model itself returns as `model_output.loss`: a mean over its supervised tokens."""

    reduction = "mean"

    def bind_model(self, model: nn.Module, distributed_setup: Any) -> None:
        """Look whether the model's loss is a mean over tokens alone.

        Raises:
            InputError: it adds a loss of its routers, which each micro-batch would balance for itself.
        """
        del distributed_setup
        whole: Any = model.config if isinstance(model, _HasConfig) else None
        config = whole.get_text_config() if isinstance(whole, _HasTextConfig) else whole
        if isinstance(config, _AddsRouterLoss) and config.output_router_logits and config.router_aux_loss_coef:
            name = type(model).__name__.removeprefix("FSDP")
            message = f"{name} adds a router loss to its own, whose value depends on how a step is cut"
            hint = "write loss_fn: causal_lm, which balances over the whole step, or set output_router_logits: false"
            raise _refused(message, hint)

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
