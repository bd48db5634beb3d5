"""Rows stacked into tensors, as long as the longest of them: no attention mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hp_core.data.protocols import Sample
from hp_core.errors import RunError

Collator = Callable[[Sequence[Sample]], dict[str, torch.Tensor]]


def rows() -> Collator:
    """Stack each array of the rows to a tensor `[batch, length]`; `index` becomes `sample_ids` `[batch]`.

    Where the rows say what is padding, `length` is where the last token of the longest row is, so that rows that are
    short cost little; otherwise it is that of the rows. Documents are kept apart by their restarting `position_ids`
    alone: an attention mask, even one of ones, would make transformers ignore them. Arrays a dataset adds of its own
    are stacked too, and cut where they are as long as the row.
    """
    return _stack


def _stack(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    columns: list[dict[str, Any]] = [dict(sample) for sample in samples]
    if any("images" in column for column in columns):
        ids = [column["index"] for column in columns if "images" in column]
        raise RunError(f"rows {ids} have images, and only trainers of images take them; write trainer: {{name: vlm}}")
    batch = {"sample_ids": torch.tensor([column.pop("index") for column in columns], dtype=torch.int64)}
    size, length = len(columns[0]["input_ids"]), _length(columns)
    for name in dict.fromkeys(name for column in columns for name in column):
        try:
            parts = [np.asarray(column[name]) for column in columns]
            if all(part.shape[:1] == (size,) for part in parts):
                parts = [part[:length] for part in parts]
            batch[name] = torch.from_numpy(np.stack(parts))
        except (KeyError, ValueError) as error:
            ids = batch["sample_ids"].tolist()
            raise RunError(f"rows {ids} can't be stacked: their {name!r} differ in shape or some lack it") from error
    return batch


def _length(columns: Sequence[dict[str, Any]]) -> int:
    """Where the padding behind the longest row begins; at least 1, because a model needs a token."""
    lengths = [1]
    for column in columns:
        if "is_padding" not in column:
            return len(columns[0]["input_ids"])
        tokens = np.flatnonzero(~np.asarray(column["is_padding"], dtype=bool))
        lengths.append(int(tokens[-1]) + 1 if tokens.size else 1)
    return max(lengths)
