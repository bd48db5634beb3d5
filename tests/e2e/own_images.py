"""A data set with images as a user might write one: nothing is known of its rows before they are read."""

from __future__ import annotations

from typing import Any

from hp_core.data.images.pixels import ImageTransform
from hp_core.data.protocols import Datasets, RowDataset, Sample
from hp_plugins.datasets.chat import chat


class OwnRows:
    """The rows of another data set."""

    report = None
    fingerprint = "own rows of images"

    def __init__(self, rows: RowDataset) -> None:
        self.rows, self.max_seq_len = rows, rows.max_seq_len

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> Sample:
        return self.rows[index]


def own_images(*, files: str, cache_dir: str, tokenizer: Any, **_: Any) -> Datasets:
    """The conversations of `files`, one in each row."""
    given = {"max_seq_len": 64, "packing": "none", "cache_dir": cache_dir, "num_proc": 1}
    made = chat(files=files, tokenizer=tokenizer, transform=ImageTransform(tokenizer), **given)
    return Datasets(OwnRows(made.train.dataset))
