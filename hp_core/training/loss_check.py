"""Finds what a loss forgot: calls it on a tiny batch and its parts, and compares with what it declares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hp_core.errors import Problem
from hp_core.training.accounting import label_of, name_fault
from hp_core.training.evaluation import evaluating
from hp_core.training.loss import IGNORE_INDEX, DeclaresReduction, LossContract
from hp_core.training.loss_fit import EntryValues, misfit
from hp_core.training.loss_rows import LENGTH, NUM_ROWS, Batch, TinyRows
from hp_core.training.restoring import restored
from hp_core.training.state import seed_everything

Run = Callable[[Batch], tuple[Any, Any]]

# Values that only differ by rounding. A row alone and beside others is computed by other kernels.
_SAME, _SAME_HALF, _ALONE, _ALONE_HALF = 1e-4, 2e-2, 1e-3, 5e-2
# Values of the same computation on other targets; a change of a single token is far above it.
_UNCHANGED = 1e-6
_REGIONS = ("first row", "other rows", "first half", "second half")


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a loss, and what may be: each says what was found, declared and measured."""

    errors: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()


def diagnose(
    loss_fn: nn.Module,
    model: nn.Module,
    contract: LossContract,
    run: Run,
    *,
    fixed: Mapping[str, torch.Tensor] | None = None,
    backward: bool,
    tells_targets_apart: bool = True,
) -> Diagnosis:
    """Try a loss on three rows of eight tokens, in evaluation mode; no state, mode or random stream is changed.

    Args:
        loss_fn: the loss, bound to the model.
        model: what it is computed of. With sharded weights every rank calls this: it takes about 15 forward passes.
        contract: what the loss declares.
        run: calls model and loss as a step does, with `input_ids`, `position_ids`, `labels` and the loss's columns,
            each of shape (rows, 8); returns what the loss returned, and the model's output.
        fixed: columns that can't be any positive number, as arrays of shape (8,).
        backward: whether the gradients are computed, too. Without it, only whether there are any is looked at.
        tells_targets_apart: whether different targets cost different amounts; not so where all logits are equal.

    Raises:
        Exception: whatever model or loss raise on rows with targets.
    """
    rows = TinyRows(contract, fixed or {})
    with evaluating(model, loss_fn), torch.enable_grad():
        trial = _Trial(loss_fn, model, contract, rows, run)
        trial.examine(backward=backward, tells_targets_apart=tells_targets_apart)
    return Diagnosis(tuple(dict.fromkeys(trial.errors)), tuple(dict.fromkeys(trial.warnings)))


@dataclass(frozen=True)
class _Reading:
    """What one call gave: each entry as a float (values of rows added up over those with a target)."""

    values: Mapping[str, float]
    outputs: Any

    def total(self, trained: tuple[str, ...]) -> float:
        return sum(self.values[name] for name in trained)


@dataclass(frozen=True)
class _Uses:
    """Whether a loss looks at its labels, and whether the targets make a difference, not just where there are any."""

    labels: bool
    targets: bool


@dataclass
class _Trial:
    loss_fn: nn.Module
    model: nn.Module
    contract: LossContract
    rows: TinyRows
    run: Run
    errors: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    trained: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return type(self.loss_fn).__name__

    def examine(self, *, backward: bool, tells_targets_apart: bool) -> None:
        batch = self.rows.whole()
        returned, outputs = self._call(batch)
        entries: dict[str, Any] = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
        self._examine_shapes(entries)
        if self.errors:
            return
        self.names = frozenset(entries)
        self.trained = tuple(name for name in entries if name not in self.contract.diagnostics)
        dtypes = {name: value.dtype for name, value in entries.items()}
        whole = _Reading({name: self._number(name, value, batch) for name, value in entries.items()}, outputs)
        self._examine_gradients(entries, whole, backward)
        if all(whole.values[name] == 0 for name in self.trained):
            self._warn(f"{self.name} is 0 on a tiny batch, so no more can be told of it")
            return
        if not math.isfinite(whole.total(self.trained)):
            self._warn(f"{self.name} is {whole.total(self.trained)} on a tiny batch, so no more can be told of it")
            return
        parts = {"all": whole, **{name: self._read(self.rows.region(name)) for name in _REGIONS}}
        # Half precision does not tell a loss of one target from that of another.
        tells_targets_apart = tells_targets_apart and all(_is_wide(dtypes[name]) for name in self.trained)
        uses = self._examine_uses(whole, parts) if tells_targets_apart else _Uses(labels=True, targets=False)
        is_by_rows = uses.labels and self._examine_reductions(parts, dtypes)
        if uses.targets:
            self._examine_ends(is_by_rows)
        self._examine_ignored(whole)

    # Calls.

    def _call(self, batch: Batch) -> tuple[Any, Any]:
        with restored(self.loss_fn, apart_from=self.model):
            seed_everything(0, 0)
            given = {name: value.clone() for name, value in batch.items()}
            found = self.run(given)
        for name, value in batch.items():
            if not torch.equal(given[name], value):
                self._wrong(f"{self.name} writes into {name!r}, which others read, too", "make a copy and change that")
        return found

    def _read(self, batch: Batch) -> _Reading:
        returned, outputs = self._call(batch)
        entries = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
        if set(entries) != self.names:
            changed = ", ".join(map(repr, sorted(self.names ^ set(entries), key=str)))
            message = f"{self.name} returns the entries {changed} for some batches only"
            self._wrong(message, "return every entry each time, with 0 where there is nothing")
            entries = {name: entries.get(name, torch.tensor(math.nan)) for name in self.names}
        return _Reading({name: self._number(name, value, batch) for name, value in entries.items()}, outputs)

    def _number(self, name: str, value: torch.Tensor, batch: Batch) -> float:
        value = value.detach().double().cpu()
        if self.contract.reduction == "sample":
            has_target = self.contract.is_target(batch[self._label(name)]).any(1)
            if value.dim() and value.shape != has_target.shape:
                message = f"{self._entry(name)} returned the shape {tuple(value.shape)} for {NUM_ROWS} rows, of which "
                hint = "return a value for each row; the trainer leaves out those without a target"
                self._wrong(f"{message}{int(has_target.sum())} have a target", hint)
                return math.nan
            return float(value[has_target].sum()) if value.dim() else float(value)
        return float(value.reshape(()))

    def _label(self, entry: str) -> str:
        return label_of(entry, dict.fromkeys(self.rows.label_names, 1.0))

    # Words.

    def _wrong(self, message: str, hint: str) -> None:
        self.errors.append(Problem(message, path="loss_fn", hint=hint))

    def _warn(self, message: str, hint: str = "") -> None:
        self.warnings.append(Problem(message, path="loss_fn", hint=hint))

    def _entry(self, name: str) -> str:
        return self.name if name == "loss" else f"{self.name}, entry {name!r},"

    @property
    def _declared(self) -> str:
        weight = self.contract.weight_column
        reduction = f"declares reduction = {self.contract.reduction!r}"
        if not isinstance(self.loss_fn, DeclaresReduction):
            reduction = f"declares no reduction (that is {self.contract.reduction!r})"
        return reduction + (f" and weight_column = {weight!r}" if weight else "")

    # What is looked at.

    def _examine_shapes(self, entries: Mapping[str, Any]) -> None:
        by_row = self.contract.reduction == "sample"
        for name, value in entries.items():
            if fault := name_fault(name):
                self._wrong(f"{self.name}: {fault}", "call it something else, such as margin_loss")
                continue
            if not isinstance(value, torch.Tensor):
                hint = "return a tensor, or a dict of tensors; a number has no gradient"
                self._wrong(f"{self._entry(name)} returned a {type(value).__name__}", hint)
                continue
            shape = tuple(value.shape)
            if by_row and shape != (NUM_ROWS,):
                message = f"{self._entry(name)} {self._declared}, a value for each row, {(NUM_ROWS,)}"
                self._wrong(f"{message}, but returned the shape {shape}", _shape_hint(shape, by_row))
            elif not by_row and value.numel() != 1:
                message = f"{self._entry(name)} {self._declared}, a scalar, but returned the shape {shape}"
                self._wrong(f"{message} for {NUM_ROWS} rows of {LENGTH} tokens", _shape_hint(shape, by_row))
            elif name not in self.contract.diagnostics and not value.is_floating_point():
                self._wrong(f"{self._entry(name)} returned the dtype {value.dtype}", "return a floating-point tensor")
        if not set(entries) - set(self.contract.diagnostics):
            found = "only diagnostics" if entries else "an empty dict"
            self._wrong(f"{self.name} returned {found}", "return a tensor, or a dict with one, to train on")
        for name in self.contract.diagnostics:
            if name not in entries:
                self._warn(f"{self.name}.diagnostics names {name!r}, which it did not return")

    def _examine_gradients(self, entries: Mapping[str, torch.Tensor], whole: _Reading, backward: bool) -> None:
        without = [name for name in self.trained if not entries[name].requires_grad]
        if len(without) == len(self.trained):
            message = f"what {self.name} returns has no gradient, so nothing would be trained"
            self._wrong(message, "it was detached, made under no_grad, or of numbers instead of tensors")
            return
        for name in without:
            message = f"{self._entry(name)} has no gradient, but is not declared as a diagnostic"
            declared = (*self.contract.diagnostics, *without)
            self._wrong(message, f"declare diagnostics = {declared!r}, or don't detach it")
        self.trained = tuple(name for name in self.trained if name not in without)
        if not backward:
            return
        parameters = [one for one in self.model.parameters() if one.requires_grad]
        if self.contract.reduction == "sample":
            self._examine_rows_without_targets(parameters)
        for name in self.trained:
            if whole.values[name] == 0:
                continue  # such as a part whose weight grows during a run
            gradients = torch.autograd.grad(
                entries[name].sum(), parameters, allow_unused=True, retain_graph=True, materialize_grads=False
            )
            if not any(one is not None and bool(one.ne(0).any()) for one in gradients):
                message = f"{self._entry(name)} has a gradient of zero for each of the model's parameters"
                self._wrong(message, "compute it of model_output without detaching anything")

    def _examine_rows_without_targets(self, parameters: list[nn.Parameter]) -> None:
        """Whether the gradient is finite where some rows have no target, whose values the trainer leaves out."""
        batch = self.rows.region("first row")
        returned, _ = self._call(batch)
        entries: dict[str, Any] = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
        for name in self.trained:
            value = entries.get(name)
            has_target = self.contract.is_target(batch[self._label(name)]).any(1)
            if not isinstance(value, torch.Tensor) or value.shape != has_target.shape:
                continue  # told where the values are read
            gradients = torch.autograd.grad(value[has_target].sum(), parameters, allow_unused=True)
            if not all(one is None or bool(one.isfinite().all()) for one in gradients):
                message = f"{self._entry(name)} has a gradient that is not finite where a row has no target"
                self._wrong(message, "divide by the row's targets with .clamp(min=1)")

    def _examine_uses(self, whole: _Reading, parts: Mapping[str, _Reading]) -> _Uses:
        """Whether the loss looks at everything that it is given."""
        total = whole.total(self.trained)

        def changes(batch: Batch) -> bool:
            return _differs(self._read(batch).total(self.trained), total)

        batch = self.rows.whole()
        for name in self.rows.label_names[1:]:
            if not changes(self.rows.with_other_targets(batch, name)):
                message = f"{self.name} declares the column {name!r}, but other targets in it change nothing"
                self._wrong(message, "use it in forward, or don't declare it")
        for name in self.rows.number_names:
            if not changes(self.rows.with_other_numbers(batch, name)):
                message = f"{self.name} declares the column {name!r}, but other numbers in it change nothing"
                if name == self.contract.weight_column:
                    message = f"{self.name} declares weight_column = {name!r}, but other weights change nothing"
                hint = (
                    "multiply each token's loss by it" if name == self.contract.weight_column else "use it in forward"
                )
                self._wrong(message, f"{hint}, or don't declare it")
        if changes(self.rows.with_other_targets(batch, "labels")):
            return _Uses(labels=True, targets=True)
        if any(_differs(part.total(self.trained), total) for part in parts.values()):
            self._warn(
                f"{self.name} is {total:.5g} whatever the targets are; only which positions have one makes a difference"
            )
            return _Uses(labels=True, targets=False)
        message = f"{self.name} ignores its labels: it is {total:.5g} with any targets, and with fewer of them"
        self._wrong(message, "compare model_output.logits[:, t] with labels[:, t]")
        return _Uses(labels=False, targets=False)

    def _examine_ends(self, is_by_rows: bool) -> None:
        """Whether labels belong to their own positions, the first and the last as well."""
        batch = self.rows.at_the_ends()
        reading = self._read(batch)
        total = reading.total(self.trained)
        hint = "labels arrive shifted: logits[:, t] belongs to labels[:, t]"
        for row, which, suspicion in (
            (0, "first", "it shifts labels that are shifted already, or leaves that position out"),
            (1, "last", "it leaves that position out"),
        ):
            other = self._read(self.rows.with_other_targets(batch, "labels", row)).total(self.trained)
            if not _differs(other, total):
                message = f"{self.name} is {total:.5g} with any target at the {which} position of a row: {suspicion}"
                self._wrong(message, hint)
        if not is_by_rows:
            return  # other positions count as well, and that has been told
        later = self._read(self.rows.with_other_later_tokens(batch))
        before, after = (_first_logits(one.outputs) for one in (reading, later))
        if before is None or after is None or not torch.equal(before, after):
            return  # the first position's own logits are not known, or see later tokens
        if _differs(later.total(self.trained), total, _SAME):
            self._wrong(
                f"{self.name} pairs labels with the logits of later positions: the loss of the first position changes "
                f"from {total:.5g} to {later.total(self.trained):.5g} with the tokens after it",
                hint,
            )

    def _examine_reductions(self, parts: Mapping[str, _Reading], dtypes: Mapping[str, torch.dtype]) -> bool:
        """Whether each trained entry is made of the losses of single rows."""
        is_by_rows = True
        alone = self._read(self.rows.first_row_alone())
        is_wide = all(_is_wide(value.dtype) for value in _tensors(alone.outputs))
        for name, dtype in dtypes.items():
            values = EntryValues(
                label=self._label(name),
                regions={region: reading.values[name] for region, reading in parts.items()},
                alone=alone.values[name],
                tolerance=_SAME if _is_wide(dtype) else _SAME_HALF,
                alone_tolerance=_ALONE if is_wide and _is_wide(dtype) else _ALONE_HALF,
            )
            found = misfit(values, self.contract, self.rows)
            if found is None or self._weights_are_unused:
                continue
            if name in self.contract.diagnostics:
                what = found.found or "is not made of the values of its rows"
                self._warn(f"{self._entry(name)} {what}, so what is logged depends on how a step is cut", found.hint)
            elif found.found is not None:
                self._wrong(f"{self._entry(name)} {found.found}, but {self._declared}: {found.measured}", found.hint)
            else:
                self._examine_unknown(name, found.measured)
                is_by_rows = False
        return is_by_rows

    @property
    def _weights_are_unused(self) -> bool:
        """Whether the weights were found to change nothing, which is why they don't normalise anything either."""
        return any("other weights change nothing" in problem.message for problem in self.errors)

    def _examine_unknown(self, name: str, measured: str) -> None:
        """A reduction without a name: either ignored labels count, or the loss compares rows with each other."""
        nothing = self._without_targets()
        value = nothing.values[name] if nothing is not None else math.nan
        if self.contract.reduction != "sample" and math.isfinite(value) and abs(value) > _UNCHANGED:
            message = f"{self._entry(name)} counts positions whose label is {IGNORE_INDEX}"
            hint = f"leave out what belongs to labels of {IGNORE_INDEX}"
            self._wrong(f"{message}: it is {value:.5g} where no label is a target, and {measured}", hint)
            return
        self._warn(
            f"{self._entry(name)} is not made of its rows' losses, so it depends on how a step is cut: {measured}",
            "in-batch negatives and sampling do that; anything else is a wrong normaliser",
        )

    def _examine_ignored(self, whole: _Reading) -> None:
        self._without_targets()
        if self.contract.ignore_index == IGNORE_INDEX:
            return
        found, total = self._read(self.rows.with_ignore_index()).total(self.trained), whole.total(self.trained)
        if _differs(found, total, _SAME):
            index = self.contract.ignore_index
            message = f"{self.name} declares ignore_index = {index}, but such labels count"
            hint = f"leave out labels of {index} as well as those of {IGNORE_INDEX}"
            self._wrong(f"{message}: {found:.5g} instead of {total:.5g} with {IGNORE_INDEX} in their place", hint)

    def _without_targets(self) -> _Reading | None:
        try:
            return self._read(self.rows.region("none"))
        except Exception as error:  # whatever it raises would end a run at its first such micro-batch
            message = f"{self.name} raises where no label is a target: {type(error).__name__}: {error}"
            self._wrong(message, "return any finite or infinite number; a micro-batch without targets counts nothing")
            return None


def _differs(one: float, other: float, tolerance: float = _UNCHANGED) -> bool:
    return not abs(one - other) <= tolerance * max(abs(one), abs(other))


def _is_wide(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point or torch.finfo(dtype).bits >= 32


def _shape_hint(shape: tuple[int, ...], by_row: bool) -> str:
    if by_row:
        return "return the loss of each row, or declare reduction = 'mean' or 'sum' and return a scalar"
    if shape == (NUM_ROWS,):
        return "declare reduction = 'sample', or reduce it to a scalar"
    return "declare reduction = 'sum' and return the sum of it"


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    values = outputs.values() if isinstance(outputs, Mapping) else (outputs,)
    return (value for value in values if isinstance(value, torch.Tensor))


def _first_logits(outputs: Any) -> torch.Tensor | None:
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
    # A loss that withholds the logits leaves something of another shape.
    if not isinstance(logits, torch.Tensor) or tuple(logits.shape[:-1]) != (NUM_ROWS, LENGTH):
        return None
    return logits[0, 0].detach()
