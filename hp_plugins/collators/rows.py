"""Rows stacked into tensors, and nothing else: no padding, no attention mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hp_core.data.protocols import Sample
from hp_core.errors import RunError

Collator = Callable[[Sequence[Sample]], dict[str, torch.Tensor]]


def rows() -> Collator:
    """Stack each array of the rows to a tensor `[batch, max_seq_len]`; `index` becomes `sample_ids` `[batch]`.

    Documents are kept apart by their restarting `position_ids` alone: an attention mask, even one of ones,
    would make transformers ignore them. Arrays a dataset adds of its own are stacked too.
    """
    return _stack


def _stack(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    columns: list[dict[str, Any]] = [dict(sample) for sample in samples]
    batch = {"sample_ids": torch.tensor([column.pop("index") for column in columns], dtype=torch.int64)}
    for name in columns[0]:
        try:
            batch[name] = torch.from_numpy(np.stack([column[name] for column in columns]))
        except (KeyError, ValueError) as error:
            ids = batch["sample_ids"].tolist()
            raise RunError(f"rows {ids} can't be stacked: their {name!r} differ in shape or some lack it") from error
    return batch
