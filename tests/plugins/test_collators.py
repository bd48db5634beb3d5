from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hp_core.errors import RunError
from hp_plugins.collators.rows import rows


def sample(index: int, length: int = 4, **extra: Any) -> Any:
    values = np.arange(length, dtype=np.int64) + 10 * index
    return {"index": index, "input_ids": values, "labels": values + 1, "position_ids": values * 0, **extra}


def test_rows_are_stacked_and_no_mask_is_made() -> None:
    batch = rows()([sample(3), sample(-1)])
    assert set(batch) == {"input_ids", "labels", "position_ids", "sample_ids"}
    assert batch["sample_ids"].tolist() == [3, -1]
    assert batch["input_ids"].tolist() == [[30, 31, 32, 33], [-10, -9, -8, -7]]
    assert batch["labels"].tolist() == [[31, 32, 33, 34], [-9, -8, -7, -6]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_a_datasets_own_arrays_arrive_with_their_type() -> None:
    batch = rows()([sample(0, weights=np.full(4, 0.5, dtype=np.float32)), sample(1, weights=np.ones(4, np.float32))])
    assert batch["weights"].dtype == torch.float32
    assert batch["weights"].tolist() == [[0.5] * 4, [1.0] * 4]


@pytest.mark.parametrize("second", [sample(2, length=5), {"index": 2, "labels": np.zeros(4, np.int64)}])
def test_rows_that_differ_are_named(second: Any) -> None:
    with pytest.raises(RunError, match=r"rows \[1, 2\] can't be stacked: their 'input_ids'"):
        rows()([sample(1), second])


def padded(index: int, size: int, length: int = 5) -> Any:
    is_padding = np.arange(length) >= size
    return sample(index, length, is_padding=is_padding, weights=np.ones(length, np.float32), picture=np.zeros((3, 2)))


def test_columns_behind_the_longest_row_are_cut_off() -> None:
    batch = rows()([padded(1, 2), padded(2, 3), padded(-1, 0)])
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        **dict.fromkeys(("input_ids", "labels", "position_ids", "is_padding", "weights"), (3, 3)),
        "sample_ids": (3,),
        "picture": (3, 3, 2),
    }
    assert batch["input_ids"].tolist() == [[10, 11, 12], [20, 21, 22], [-10, -9, -8]]
    assert batch["is_padding"].tolist() == [[False, False, True], [False] * 3, [True] * 3]
    assert all(value.is_contiguous() for value in batch.values())


def test_a_batch_of_empty_rows_keeps_a_token_and_a_full_row_everything() -> None:
    assert rows()([padded(-1, 0), padded(-1, 0)])["input_ids"].shape == (2, 1)
    assert rows()([padded(1, 5), padded(2, 1)])["input_ids"].shape == (2, 5)


def test_padding_in_front_of_tokens_is_kept() -> None:
    one = sample(1, 5, is_padding=np.array([True, True, False, True, True]))
    assert rows()([one])["input_ids"].tolist() == [[10, 11, 12]]
