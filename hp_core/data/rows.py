"""What makes any row dataset fit the global order: the empty row, and a check of what a component returned."""

from __future__ import annotations

from typing import cast

import numpy as np

from hp_core.data.mixed import MixedRows
from hp_core.data.packing import PackedRows
from hp_core.data.protocols import EMPTY_ROW, IGNORED_LABEL, DataReport, Datasets, RowDataset, Sample
from hp_core.data.streaming import StreamingRows
from hp_core.entry_points import describe, raised_in
from hp_core.errors import HpError, InputError, Problem

# The number of a row, and its images: an empty row has neither.
_OF_ROWS = ("index", "images")


class WithEmptyRow:
    """A dataset whose row -1 is an empty row: padding without a target, so it adds exactly 0 to any loss.

    Ranks that run out of rows in a step take it, so that every rank runs the same number of micro-batches.
    Arrays a dataset adds of its own are zero in it, except that `…_labels` have no target either.
    """

    def __init__(self, dataset: RowDataset | StreamingRows) -> None:
        self.dataset = dataset

    @property
    def fingerprint(self) -> str:
        """The dataset's own."""
        return self.dataset.fingerprint

    @property
    def max_seq_len(self) -> int:
        """The dataset's own."""
        return self.dataset.max_seq_len

    @property
    def report(self) -> DataReport | None:
        """The dataset's own."""
        return self.dataset.report

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the recipe asks for, which a loss must then take; arrays of a user's own are not."""
        return self.dataset.columns if isinstance(self.dataset, (PackedRows, MixedRows, StreamingRows)) else ()

    @property
    def draws_nothing(self) -> bool:
        """Whether it is known that no row draws random numbers when it is read."""
        return isinstance(self.dataset, (PackedRows, MixedRows, StreamingRows))

    @property
    def has_images(self) -> bool | None:
        """Whether some row has an image; None where that is not known: of streamed rows, and of a user's own."""
        if isinstance(self.dataset, (PackedRows, MixedRows)):
            return self.dataset.has_images
        return False if isinstance(self.dataset, StreamingRows) and not self.dataset.has_images else None

    @property
    def mixed(self) -> MixedRows | None:
        """The dataset, if it is made of named sources."""
        return self.dataset if isinstance(self.dataset, MixedRows) else None

    @property
    def streamed(self) -> StreamingRows | None:
        """The dataset, if its rows are streamed and their number is not known."""
        return self.dataset if isinstance(self.dataset, StreamingRows) else None

    def __len__(self) -> int:
        """How many rows there are. Raises `TypeError` for streamed rows."""
        if isinstance(self.dataset, StreamingRows):
            raise TypeError("streamed rows have no known number")
        return len(self.dataset)

    def __getitem__(self, index: int, /) -> Sample:
        if index != EMPTY_ROW:
            return self.dataset[index]
        empty = {name: np.zeros_like(value) for name, value in self._first().items() if name not in _OF_ROWS}
        for name, value in empty.items():
            if name == "labels" or name.endswith("_labels"):
                value[...] = IGNORED_LABEL
            elif name == "is_padding":
                value[...] = True
        empty["position_ids"][...] = np.arange(self.max_seq_len)
        return cast(Sample, {"index": EMPTY_ROW, **empty})

    def _first(self) -> Sample:
        try:
            return self.dataset[0]
        except HpError:
            raise
        except Exception as error:
            message = f"the first row can't be read: {describe(error)}"
            raise InputError(Problem(message, path="dataset", hint=raised_in(error))) from error


def as_datasets(built: object) -> Datasets:
    """The `Datasets` meant by what a dataset component returned: that, a dataset, or (train, validation, test).

    Every dataset in the result has an empty row. Raises `InputError` naming what a dataset lacks.
    """
    if isinstance(built, Datasets):
        datasets = built
    elif isinstance(built, (tuple, list)):
        if not 1 <= len(built) <= 3 or built[0] is None:
            raise InputError(f"the dataset component returned {len(built)} parts, not (train, validation, test)")
        datasets = Datasets(*built)
    else:
        datasets = Datasets(cast(RowDataset, built))
    return Datasets(
        train=_prepare(datasets.train, "training"),
        validation=None if datasets.validation is None else _prepare(datasets.validation, "validation"),
        test=None if datasets.test is None else _prepare(datasets.test, "test"),
        tokenizer=datasets.tokenizer,
    )


def _prepare(dataset: RowDataset, role: str) -> WithEmptyRow:
    if isinstance(dataset, WithEmptyRow):
        return dataset
    needed = ("fingerprint", "max_seq_len", "report", "__len__", "__getitem__")
    missing = [name for name in needed if not hasattr(dataset, name)]
    if missing:
        message = f"the {role} dataset, a {type(dataset).__name__}, lacks {', '.join(missing)}"
        hint = "see 'A data set of your own' in docs/writing-a-plugin.md"
        raise InputError(Problem(message, path="dataset", hint=hint))
    return WithEmptyRow(dataset)
