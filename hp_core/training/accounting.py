"""What one step counts and adds up: supervised tokens, exact loss weights, and the parts that are logged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from hp_core.data.protocols import EMPTY_ROW
from hp_core.errors import RunError
from hp_core.parallel.agreement import gathered
from hp_core.parallel.setup import DistributedSetup
from hp_core.training.loss import LossContract


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass: what the model and the loss are called with, still on the host.

    By label tensor, `targets` holds this rank's supervised tokens and `amounts` what its loss counts for: those
    tokens, their summed weights, or the rows that have any. `rows` says which rows do. `real_tokens`, bool of the
    labels' shape, is False on padding. `sample_ids` are the rows it is made of.
    """

    model_inputs: dict[str, Any]
    loss_inputs: dict[str, Any]
    targets: Mapping[str, int]
    amounts: Mapping[str, float]
    rows: Mapping[str, torch.Tensor]
    real_tokens: torch.Tensor
    sample_ids: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, model_inputs: dict[str, Any], loss_inputs: dict[str, Any], contract: LossContract | None = None
    ) -> MicroBatch:
        """Count what the loss counts, and take out of `loss_inputs` what no loss needs.

        Raises:
            RunError: there are no labels, or a token's weight is negative or not finite.
        """
        contract = contract or LossContract()
        loss_inputs = dict(loss_inputs)
        sample_ids = loss_inputs.pop("sample_ids", None)
        is_padding = loss_inputs.pop("is_padding", None)
        ids = () if sample_ids is None else tuple(int(i) for i in sample_ids)
        if "labels" not in loss_inputs:
            raise RunError("get_batch returned loss inputs without 'labels'; nothing can be counted")
        is_target = {name: contract.is_target(labels) for name, labels in _label_tensors(loss_inputs)}
        targets = {name: int(where.sum()) for name, where in is_target.items()}
        rows = {name: where.reshape(len(where), -1).any(-1) for name, where in is_target.items()}
        amounts = {name: float(count) for name, count in targets.items()}
        if contract.reduction == "sample":
            amounts = {name: float(have.sum()) for name, have in rows.items()}
        elif contract.weight_column is not None:
            amounts["labels"] = _summed_weights(loss_inputs, contract.weight_column, is_target["labels"], ids)
        real_tokens = _real_tokens(loss_inputs["labels"], is_padding, ids)
        return cls(model_inputs, loss_inputs, targets, amounts, rows, real_tokens, ids)

    def told(self) -> str:
        """The rows it is made of, for an error."""
        return f"samples {', '.join(str(one) for one in self.sample_ids if one != EMPTY_ROW) or 'none'}"


def _label_tensors(loss_inputs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in sorted(loss_inputs.items()):
        if (name == "labels" or name.endswith("_labels")) and isinstance(value, torch.Tensor):
            yield name, value


def _summed_weights(
    loss_inputs: Mapping[str, Any], column: str, is_target: torch.Tensor, sample_ids: Sequence[int]
) -> float:
    weights = loss_inputs.get(column)
    if not isinstance(weights, torch.Tensor) or weights.shape != is_target.shape:
        return math.nan  # the column is refused, by name, where the loss is called
    weights = weights[is_target].double()
    if not bool(((weights >= 0) & weights.isfinite()).all()):
        raise RunError(
            f"samples {list(sample_ids)}: the weights in the column {column!r} must be finite and not negative"
        )
    return float(weights.sum())


def _real_tokens(labels: torch.Tensor, is_padding: torch.Tensor | None, sample_ids: Sequence[int]) -> torch.Tensor:
    if is_padding is not None:
        return ~is_padding.bool()
    real_tokens = torch.ones(labels.shape, dtype=torch.bool)
    for row, sample in enumerate(sample_ids):
        real_tokens[row] = sample != EMPTY_ROW
    return real_tokens


@dataclass(frozen=True)
class StepCounts:
    """What a step is made of: targets and amounts by label tensor, and real tokens.

    `flags` are the sums of what else the ranks had to tell each other.
    """

    targets: Mapping[str, int] = field(default_factory=dict)
    amounts: Mapping[str, float] = field(default_factory=dict)
    real_tokens: int = 0
    flags: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to learn from."""
        return not any(self.amounts.values())

    def and_of(self, micro_batch: MicroBatch) -> StepCounts:
        """These counts and those of one more micro-batch."""
        return StepCounts(
            {name: self.targets.get(name, 0) + count for name, count in micro_batch.targets.items()},
            {name: self.amounts.get(name, 0.0) + amount for name, amount in micro_batch.amounts.items()},
            self.real_tokens + int(micro_batch.real_tokens.sum()),
        )

    def over_all_ranks(self, contract: LossContract, setup: DistributedSetup, flags: Sequence[int] = ()) -> StepCounts:
        """The sum over all ranks: one integer all-reduce, and a collective of float64 where not tokens are counted."""
        names = sorted(self.targets)
        own = [*(self.targets[name] for name in names), self.real_tokens]
        summed = setup.sum_on_host(own, flags)
        real_tokens, told = summed[len(names)], tuple(summed[len(own) :])
        targets = dict(zip(names, summed[: len(names)], strict=True))
        if contract.reduction != "sample" and contract.weight_column is None:
            return StepCounts(targets, {name: float(count) for name, count in targets.items()}, real_tokens, told)
        # The stages of a pipeline have the same rows.
        by_rank = setup.gather_on_host([self.amounts[name] * setup.has_last_stage for name in names])
        totals = [math.fsum(column) for column in zip(*by_rank, strict=True)]
        return StepCounts(targets, dict(zip(names, totals, strict=True)), real_tokens, told)


def count_step(
    micro_batches: Iterable[MicroBatch],
    contract: LossContract,
    setup: DistributedSetup,
    *,
    labels: Sequence[str] = (),
    flags: Sequence[int] = (),
) -> StepCounts:
    """Count the whole step, over its micro-batches and all ranks.

    Args:
        micro_batches: this rank's; none counts nothing.
        contract: what the loss counts for.
        setup: the run's ranks.
        labels: the label tensors of every rank's micro-batches, for a rank that may have none.
        flags: what else to sum over all ranks.
    """
    counts = StepCounts(dict.fromkeys(labels, 0), dict.fromkeys(labels, 0.0))
    for micro_batch in micro_batches:
        counts = counts.and_of(micro_batch)
    return counts.over_all_ranks(contract, setup, flags)


def agree_on_labels(
    micro_batches: Sequence[MicroBatch], known: Sequence[str] | None, setup: DistributedSetup
) -> tuple[str, ...]:
    """The label tensors that every rank's micro-batches have; those `known` from an earlier step, or asked for once.

    Raises:
        RunError: micro-batches of this rank, or of another, have others.
    """
    own = [tuple(sorted(one.targets)) for one in micro_batches]
    found = [names for names in gathered(own[0] if own else None, setup) if names] if known is None else [known]
    expected = tuple(found[0]) if found else ()
    for names in (*own, *found):
        if tuple(names) != expected:
            raise RunError(
                f"get_batch returned the label tensors {', '.join(names)}, and elsewhere {', '.join(expected)}; return "
                "the same each time, without any target where there is nothing to learn"
            )
    return expected


@dataclass
class StepLoss:
    """Weighs the losses of a step's micro-batches so that their sum is the loss of one whole batch.

    With `n` of the step's `N` supervised tokens (or of their weights) in a micro-batch, a mean over its tokens counts
    `n / N` and a sum counts `1 / N`; values of single rows count `1 / N` each, `N` being the step's rows with a
    target. An entry `x_loss` of a dict is counted by `x_labels` where the batch has them, by `labels` otherwise.
    Without supervised tokens a micro-batch counts exactly zero, whatever its loss returned.
    """

    contract: LossContract
    counts: StepCounts
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    terms: dict[str, torch.Tensor] = field(default_factory=dict)
    per_micro_batch: list[torch.Tensor] = field(default_factory=list)
    alone: list[torch.Tensor] = field(default_factory=list)
    num_counted: int = 0

    def weigh(
        self, loss: Any, model_output: Any, micro_batch: MicroBatch, terms: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """The scalar to call `backward()` on, for what a loss returned for one micro-batch.

        Args:
            loss: a tensor, or a dict of them by name: scalars, or a value for each row.
            model_output: what the model returned; keeps the graph alive where nothing is to be learnt.
            micro_batch: what the loss was computed of.
            terms: this micro-batch's shares of what depends on the whole step.
        """
        weighted: torch.Tensor | None = None
        is_left_out = False
        for name, value in loss_entries(loss, self.contract, micro_batch).items():
            # Every rank knows every entry, also where it has nothing to add: the logged vector must line up.
            self.parts.setdefault(name, torch.zeros((), dtype=torch.float64, device=value.device))
            is_trained = name not in self.contract.diagnostics
            counted = counted_value(name, value, self.contract, micro_batch)
            if counted is None:
                is_left_out = is_left_out or is_trained
                continue
            self.num_counted += 1
            value, factor = counted
            weight = factor / self.counts.amounts[label_of(name, self.counts.amounts)]
            part = value * weight
            # What is logged is rounded once, however many micro-batches it is the sum of.
            self.parts[name] = self.parts[name] + value.detach().double() * weight
            if is_trained:
                weighted = part if weighted is None else weighted + part
        total, value = self._joined(weighted, model_output, is_left_out)
        for share in self.add_terms(terms or {}):
            total, value = total + share, value + share.detach().float()
        self.per_micro_batch.append(value)
        return total

    def add_terms(self, terms: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Keep a micro-batch's shares of what depends on the whole step for the log, and return them."""
        for name, share in terms.items():
            if fault := name_fault(name):
                raise RunError(f"loss_fn: {fault}; call it something else")
            if name in self.parts:
                raise RunError(f"loss_fn: {name!r} is both an entry of the loss and a term of the step")
            self.terms[name] = self.terms.get(name, torch.zeros((), device=share.device)) + share.detach().float()
        return list(terms.values())

    def add_terms_alone(self, terms: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """`add_terms` of a stage that has no loss besides."""
        shares = self.add_terms(terms)
        self.alone += [share.detach() for share in shares]
        return shares

    def fill(self, names: Iterable[str]) -> None:
        """Have a zero for each of the names that other stages of a pipeline gave."""
        device = next((one.device for one in self.logged.values()), torch.device("cpu"))
        for name in names:
            if name not in self.parts and name not in self.terms:
                self.parts[name] = torch.zeros((), device=device)

    def _joined(
        self, weighted: torch.Tensor | None, model_output: Any, is_left_out: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What to call `backward()` on, and its value; the same wherever everything counts.

        Every rank must join every collective of the backward pass, also where it has nothing to learn, or nothing of
        one of the entries.
        """
        if weighted is None:
            total = zero_of(model_output)
            return total, torch.zeros((), device=total.device)
        total = weighted + zero_of(model_output) if is_left_out else weighted
        return total, weighted.detach().float()

    @property
    def logged(self) -> dict[str, torch.Tensor]:
        """This rank's share of everything that is logged by name: entries, diagnostics and terms."""
        return {**self.parts, **self.terms}

    def num_nonfinite(self, device: torch.device) -> torch.Tensor:
        """How many of this rank's losses of micro-batches, or terms without one, are not finite: a scalar."""
        values = [*self.per_micro_batch, *(one.float() for one in self.alone)]
        if not values:
            return torch.zeros((), device=device)
        return (~torch.stack(values).isfinite()).sum()


def counted_value(
    entry: str, value: torch.Tensor, contract: LossContract, micro_batch: MicroBatch
) -> tuple[torch.Tensor, float] | None:
    """An entry of a loss as a scalar and the factor that makes it a sum over all that it counts for.

    None where nothing counts: the value may be anything then.
    """
    label = label_of(entry, micro_batch.amounts)
    amount = micro_batch.amounts.get(label, 0.0)
    if amount == 0:
        return None
    if contract.reduction == "sample":
        counts = micro_batch.rows[label].to(value.device, non_blocking=True)
        return torch.where(counts, value, torch.zeros_like(value)).sum(), 1.0
    return value, amount if contract.reduction == "mean" else 1.0


def label_of(entry: str, counts: Mapping[str, float]) -> str:
    """The label tensor that counts the loss entry: `x_labels` for `x_loss` where there is one, else `labels`."""
    own = f"{entry.removesuffix('_loss')}_labels"
    return own if own in counts else "labels"


# What a row of metrics holds beside the entries of a loss.
METRICS = frozenset(
    {"step", "grad_norm", "lr", "tokens", "total_tokens", "tokens_per_second", "step_time_s", "data_time_s", "epoch"}
    | {"samples", "skipped_steps", "skipped", "time_s", "tflops_per_second", "mfu"}
)


def name_fault(entry: object) -> str | None:
    """What is wrong with the name of a loss's entry, or None."""
    if not isinstance(entry, str) or not entry:
        return f"the entry {entry!r} has no name"
    if entry in METRICS or entry.startswith(("rows/", "targets/")):
        return f"the entry {entry!r} has the name of another metric"
    return None


def by_name(loss: Any) -> dict[str, Any]:
    """What a loss returned, by entry; a bare value is the entry `loss`."""
    return dict(loss) if isinstance(loss, Mapping) else {"loss": loss}


def loss_entries(loss: Any, contract: LossContract, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
    """What a loss returned, by entry, as `by_name` has it.

    Raises:
        RunError: something is not a tensor of the shape that the loss declares, or there is nothing to train.
    """
    entries = by_name(loss)
    num_rows = len(micro_batch.rows["labels"])
    for name, value in entries.items():
        if fault := name_fault(name):
            raise RunError(f"loss_fn: {fault}; call it something else")
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        if contract.reduction == "sample":
            if shape != (num_rows,):
                wanted = f"a value for each of the {num_rows} rows"
                raise RunError(f"loss_fn: {name!r} must be {wanted}, as its reduction 'sample' says, got {shape}")
        elif not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise RunError(f"loss_fn: {name!r} must be a scalar tensor, got {shape}")
    if not set(entries) - set(contract.diagnostics):
        found = "only diagnostics" if entries else "an empty dict"
        raise RunError(f"loss_fn: returned {found}; it must return a tensor, or a dict with one, to train on")
    return entries if contract.reduction == "sample" else {name: value.reshape(()) for name, value in entries.items()}


def zero_of(model_output: Any) -> torch.Tensor:
    """An exact zero gradient through everything the model computed, so that every rank joins every collective."""
    # Multiplied before it is summed: the gradient is zero even where the value is not finite.
    zeros = [(value * 0.0).sum().float() for value in _tensors_of(model_output) if value.requires_grad]
    if not zeros:
        raise RunError("the model returned no tensor with a gradient; is every parameter frozen?")
    return torch.stack(zeros).sum()


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_of(item)


@runtime_checkable
class _MovesToDevice(Protocol):
    """A tensor, or something that is made of tensors."""

    def to(self, device: torch.device, *, non_blocking: bool) -> Any:
        """The same on the device."""
        ...


def on_device(value: Any, device: torch.device) -> Any:
    """Tensors of a (nested) batch on `device`; everything else as it is."""
    if isinstance(value, _MovesToDevice):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {name: on_device(item, device) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(on_device(item, device) for item in value)
    return value
