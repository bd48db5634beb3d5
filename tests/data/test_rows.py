from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hp_core.data.protocols import Datasets
from hp_core.data.rows import WithEmptyRow, as_datasets
from hp_core.errors import InputError


class Weighted:
    """A user's dataset with an array of its own."""

    fingerprint = "weighted"
    max_seq_len = 3
    report = None

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = np.array([5, 6, 7])
        return {
            "index": index,
            "input_ids": ids,
            "labels": ids + 1,
            "position_ids": np.arange(3),
            "weights": np.full(3, 0.5, dtype=np.float32),
            "mtp_labels": ids + 2,
        }


def test_the_empty_row_has_no_target_and_all_arrays() -> None:
    rows = WithEmptyRow(Weighted())  # type: ignore[arg-type]
    empty: Any = rows[-1]
    assert empty["index"] == -1
    assert empty["labels"].tolist() == [-100] * 3
    assert empty["position_ids"].tolist() == [0, 1, 2]
    assert empty["input_ids"].tolist() == [0, 0, 0]
    assert empty["weights"].tolist() == [0, 0, 0]
    assert empty["weights"].dtype == np.float32
    # Counted as targets, like the labels, so zeros would be tokens.
    assert empty["mtp_labels"].tolist() == [-100] * 3


class Unreadable(Weighted):
    def __getitem__(self, index: int) -> dict[str, Any]:
        raise ValueError(f"no row {index}")


def test_a_first_row_that_cant_be_read_is_a_fault_of_the_data() -> None:
    with pytest.raises(InputError) as raised:
        WithEmptyRow(Unreadable())[-1]  # type: ignore[arg-type]
    [problem] = raised.value.problems
    assert (problem.path, problem.message) == ("dataset", "the first row can't be read: ValueError: no row 0")
    assert problem.hint.startswith("raised in test_rows.py, line ")


def test_other_rows_and_facts_are_the_datasets_own() -> None:
    rows = WithEmptyRow(Weighted())  # type: ignore[arg-type]
    assert rows[1]["index"] == 1
    assert rows[1]["labels"].tolist() == [6, 7, 8]
    assert (len(rows), rows.fingerprint, rows.max_seq_len, rows.report) == (2, "weighted", 3, None)


@pytest.mark.parametrize("built", [Weighted(), (Weighted(), None, Weighted()), Datasets(Weighted(), test=Weighted())])  # type: ignore[arg-type]
def test_what_a_component_may_return(built: object) -> None:
    datasets = as_datasets(built)
    assert isinstance(datasets.train, WithEmptyRow)
    assert datasets.validation is None
    assert (datasets.test is None) == isinstance(built, Weighted)
    assert as_datasets(datasets).train is datasets.train


def test_what_a_component_may_not_return() -> None:
    with pytest.raises(InputError, match="training dataset, a str, lacks fingerprint, max_seq_len, report"):
        as_datasets("text")
    with pytest.raises(InputError, match="validation dataset, a list, lacks"):
        as_datasets((Weighted(), [1]))
    with pytest.raises(InputError, match="4 parts"):
        as_datasets((Weighted(),) * 4)
