"""What the values of a loss on parts of a batch say about how it reduces, compared with what it declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hp_core.training.loss import LossContract
from hp_core.training.loss_rows import NUM_ROWS, TinyRows

# How the value of a whole follows from those of its parts: added up, or averaged by what each part holds.
ADDED, BY_ROWS = "(added)", "(by rows)"


@dataclass(frozen=True)
class EntryValues:
    """An entry of a loss on each region of the tiny rows, and on the first row without the others.

    `tolerance` is relative; `alone_tolerance` is for values of batches of different sizes, which devices compute with
    different roundings.
    """

    label: str
    regions: Mapping[str, float]
    alone: float
    tolerance: float
    alone_tolerance: float


@dataclass(frozen=True)
class Misfit:
    """How an entry differs from what is declared; without `found`, no known reduction gives its values."""

    found: str | None
    measured: str
    hint: str = ""


@dataclass(frozen=True)
class _Cut:
    whole: str
    parts: tuple[str, str]


_WITHIN = _Cut("first row", ("first half", "second half"))
_ACROSS = _Cut("all", ("first row", "other rows"))


def misfit(values: EntryValues, contract: LossContract, rows: TinyRows) -> Misfit | None:
    """None if the values of an entry are those of the reduction that the loss declares."""
    fit = _Fit(values, contract, rows)
    declared = fit.declared_kind
    if contract.reduction == "sample":
        fits = fit.holds(_ACROSS, ADDED) and fit.is_alone(1.0)
        return None if fits else Misfit(None, fit.measured(ADDED))
    if fit.holds(_WITHIN, declared) and fit.holds(_ACROSS, declared) and fit.is_alone(1.0):
        return None
    measured = fit.measured(declared)
    for within, across in fit.others():
        named = _named(fit, within, across)
        if named is not None:
            return Misfit(named[0], measured, named[1])
    return Misfit(None, measured)


class _Fit:
    def __init__(self, values: EntryValues, contract: LossContract, rows: TinyRows) -> None:
        self.values, self.contract, self.rows = values, contract, rows

    @property
    def is_weighted(self) -> bool:
        """Whether the engine counts this entry by weights."""
        return self.contract.weight_column is not None and self.values.label == "labels"

    @property
    def declared_kind(self) -> str:
        if self.contract.reduction != "mean":
            return ADDED
        return self.contract.weight_column or "" if self.is_weighted else self.values.label

    def kinds(self) -> tuple[str, ...]:
        return (ADDED, *self.rows.label_names, *self.rows.number_names, BY_ROWS)

    def others(self) -> Iterator[tuple[str, str]]:
        """The pairs of reductions, within a row and across rows, that give the values; the closest comes first."""
        found = [
            (self.error(_WITHIN, within) + self.error(_ACROSS, across), within, across)
            for within in self.kinds()
            for across in self.kinds()
            if within != BY_ROWS and self.holds(_WITHIN, within) and self.holds(_ACROSS, across)
        ]
        for _, within, across in sorted(found):
            yield within, across

    def predicted(self, cut: _Cut, kind: str) -> float:
        values = [self.values.regions[part] for part in cut.parts]
        if kind == ADDED:
            return sum(values)
        weights = [self._amount(part, kind) for part in cut.parts]
        return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)

    def _amount(self, region: str, kind: str) -> float:
        if kind == BY_ROWS:
            return self.rows.num_rows(region, self.values.label)
        if kind in self.rows.label_names:
            return self.rows.num_targets(region, kind)
        return self.rows.summed(region, kind, self.values.label)

    def error(self, cut: _Cut, kind: str) -> float:
        """How far the whole is from what its parts predict, relative to the largest of them."""
        whole = self.values.regions[cut.whole]
        largest = max(abs(whole), *(abs(self.values.regions[part]) for part in cut.parts), 1e-30)
        return abs(whole - self.predicted(cut, kind)) / largest

    def holds(self, cut: _Cut, kind: str) -> bool:
        return self.error(cut, kind) <= self.values.tolerance  # false where a value is not finite

    def is_alone(self, ratio: float) -> bool:
        """Whether the first row alone has `ratio` times the value that it has beside rows without targets."""
        beside, alone = self.values.regions["first row"] * ratio, self.values.alone
        return abs(alone - beside) <= self.values.alone_tolerance * max(abs(beside), abs(alone))

    def measured(self, declared: str) -> str:
        """The numbers that show the misfit most plainly."""
        for cut, what in ((_ACROSS, "rows"), (_WITHIN, "parts of a row")):
            if not self.holds(cut, declared):
                sizes = [int(self.rows.num_targets(part, self.values.label)) for part in cut.parts]
                values = [self.values.regions[part] for part in cut.parts]
                return (
                    f"{what} with {sizes[0]} and {sizes[1]} targets give {values[0]:.5g} and {values[1]:.5g}, both "
                    f"together {self.values.regions[cut.whole]:.5g} instead of {self.predicted(cut, declared):.5g}"
                )
        return (
            f"a row alone gives {self.values.alone:.5g}, beside {NUM_ROWS - 1} rows without targets "
            f"{self.values.regions['first row']:.5g}"
        )


_MAKE_MEAN = "divide by the number of supervised tokens"
_MAKE_SUM = "return the sum over the supervised tokens"


def _named(fit: _Fit, within: str, across: str) -> tuple[str, str] | None:
    """What a loss does that reduces this way, and what to do about it."""
    label, weight_column, is_sum = fit.values.label, fit.contract.weight_column, fit.contract.reduction == "sum"
    mean = f"divide by the summed {weight_column!r} of the supervised tokens" if fit.is_weighted else _MAKE_MEAN
    remedy = _MAKE_SUM if is_sum else mean
    if (within, across) == (ADDED, ADDED):
        if fit.is_alone(float(NUM_ROWS)):
            return "divides by all positions or rows, not by those that have a target", remedy
        if fit.is_alone(1.0) and not is_sum:
            return "is a sum over the supervised tokens", f"declare reduction = 'sum', or {mean}"
        return None
    if (within, across) == (ADDED, BY_ROWS):
        return "divides by the number of rows, not by the supervised tokens", remedy
    if across in (ADDED, BY_ROWS):
        hint = f"{remedy}, or return a value for each row and declare reduction = 'sample'"
        return "averages the tokens of each row first, so that those of short rows count more", hint
    if within != across or not fit.is_alone(1.0):
        return None
    if across in fit.rows.number_names:
        hint = f"declare reduction = 'mean' and weight_column = {across!r}"
        if across == weight_column:
            hint = "declare reduction = 'mean', or return the sum of the weighted losses"
        return f"divides by the summed column {across!r}", hint
    if across != label:
        return f"divides by the number of targets in {across!r}, not by those in {label!r} that count it", remedy
    if fit.is_weighted:
        return f"divides by the number of supervised tokens, not by their summed weights {weight_column!r}", remedy
    return "is a mean over the supervised tokens", f"declare reduction = 'mean', or {_MAKE_SUM}"
