"""A tiny batch with targets in groups of different sizes, so that a wrong normaliser can be told by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hp_core.training.loss import IGNORE_INDEX, LossContract

NUM_ROWS, LENGTH = 3, 8
# Every vocabulary has these; a model is asked for no others.
NUM_IDS = 8

Batch = dict[str, torch.Tensor]

# By row, where the targets are. Neither end of a row has any, since a loss that leaves one out is told apart. The
# shares of row 0 among the targets (6 of 9) and of its first half (4 of 6) are not those among rows or positions.
_LABELS = ((1, 2, 3, 4, 5, 6), (2,), (3, 5))
_OTHER_LABELS = ((2, 5, 6), (1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 6))
_FIRST_HALF = 5


def _regions() -> dict[str, torch.Tensor]:
    row = torch.arange(NUM_ROWS)[:, None].expand(NUM_ROWS, LENGTH)
    column = torch.arange(LENGTH).expand(NUM_ROWS, LENGTH)
    return {
        "all": torch.ones(NUM_ROWS, LENGTH, dtype=torch.bool),
        "none": torch.zeros(NUM_ROWS, LENGTH, dtype=torch.bool),
        "first row": row == 0,
        "other rows": row > 0,
        "first half": (row == 0) & (column < _FIRST_HALF),
        "second half": (row == 0) & (column >= _FIRST_HALF),
    }


@dataclass(frozen=True)
class TinyRows:
    """Three rows of eight tokens, and what a loss declares of them.

    `fixed` holds the columns that take only certain values (whole numbers), arrays of shape (8,); the other columns
    are positive numbers, drawn once.
    """

    contract: LossContract
    fixed: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def label_names(self) -> tuple[str, ...]:
        """The label tensors: `labels`, and any column `x_labels`."""
        return ("labels", *(name for name in self.contract.columns if name.endswith("_labels")))

    @property
    def number_names(self) -> tuple[str, ...]:
        """The columns that may take any positive number."""
        return tuple(name for name in self.contract.columns if name not in (*self.label_names, *self.fixed))

    def whole(self) -> Batch:
        """The whole batch: `input_ids`, `position_ids`, `labels` and the columns, each of shape (3, 8)."""
        generator = torch.Generator().manual_seed(0)
        shape = (NUM_ROWS, LENGTH)
        batch = {
            "input_ids": torch.randint(0, NUM_IDS, shape, generator=generator),
            "position_ids": torch.arange(LENGTH).repeat(NUM_ROWS, 1),
        }
        for name in self.label_names:
            allowed = self._allowed(name)
            targets = allowed[torch.randint(0, len(allowed), shape, generator=generator)]
            places = _LABELS if name == "labels" else _OTHER_LABELS
            batch[name] = torch.full(shape, IGNORE_INDEX)
            for row, columns in enumerate(places):
                batch[name][row, list(columns)] = targets[row, list(columns)]
        for name in self.number_names:
            batch[name] = torch.rand(shape, generator=generator) * 1.8 + 0.2
        return {**batch, **{name: value.expand(shape).clone() for name, value in self.fixed.items()}}

    def region(self, name: str) -> Batch:
        """The batch with the targets of one region only; everything else stays as it is."""
        inside, batch = _regions()[name], self.whole()
        for label in self.label_names:
            batch[label] = batch[label].masked_fill(~inside, IGNORE_INDEX)
        return batch

    def first_row_alone(self) -> Batch:
        """The first row without the others."""
        return {name: value[:1].clone() for name, value in self.whole().items()}

    def num_targets(self, region: str, label: str) -> float:
        """The targets of a label tensor in a region."""
        return float(self._is_target(region, label).sum())

    def num_rows(self, region: str, label: str) -> float:
        """The rows of a region that have a target of a label tensor."""
        return float(self._is_target(region, label).any(1).sum())

    def summed(self, region: str, column: str, label: str) -> float:
        """The sum of a column over the targets of a label tensor in a region."""
        return float(self.whole()[column][self._is_target(region, label)].double().sum())

    def _is_target(self, region: str, label: str) -> torch.Tensor:
        return self.contract.is_target(self.region(region)[label])

    def at_the_ends(self) -> Batch:
        """One target at the first position of row 0, and one at the last position of row 1."""
        batch, whole = self.whole(), self.whole()
        for name in self.label_names:
            batch[name] = torch.full((NUM_ROWS, LENGTH), IGNORE_INDEX)
            batch[name][0, 0], batch[name][1, -1] = whole[name][0, 2 if name != "labels" else 1], whole[name][1, 2]
        return batch

    def with_other_targets(self, batch: Batch, label: str, row: int | None = None) -> Batch:
        """The batch with another target in place of each one of a label tensor, in all rows or in one."""
        allowed = self._allowed(label).tolist()
        following = dict(zip(allowed, allowed[1:] + allowed[:1], strict=True))
        labels = batch[label].clone()
        for place in torch.nonzero(self.contract.is_target(labels)).tolist():
            if row is None or place[0] == row:
                labels[tuple(place)] = following[int(labels[tuple(place)])]
        return {**batch, label: labels}

    def with_other_numbers(self, batch: Batch, column: str) -> Batch:
        """The batch with other numbers in a column, not all by the same factor."""
        steps = torch.arange(1, batch[column].numel() + 1).reshape(batch[column].shape)
        return {**batch, column: batch[column] * (1 + steps % 5)}

    def with_other_later_tokens(self, batch: Batch) -> Batch:
        """The batch with other tokens after the first one of row 0."""
        ids = batch["input_ids"].clone()
        ids[0, 1:] = (ids[0, 1:] + 1) % NUM_IDS
        return {**batch, "input_ids": ids}

    def with_ignore_index(self) -> Batch:
        """The whole batch with the loss's `ignore_index` in place of some labels of -100."""
        batch = self.whole()
        for name in self.label_names:
            ignored = (batch[name] == IGNORE_INDEX) & (torch.arange(LENGTH) % 2 == 0)
            batch[name] = batch[name].masked_fill(ignored, self.contract.ignore_index)
        return batch

    def _allowed(self, label: str) -> torch.Tensor:
        """The targets that a label tensor may hold: ids for `labels`; any other has at least two classes."""
        num_classes = NUM_IDS if label == "labels" else 3
        allowed = [one for one in range(num_classes) if one != self.contract.ignore_index]
        return torch.tensor(allowed if label == "labels" else allowed[:2])
