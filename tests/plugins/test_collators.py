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
