"""A processor and conversations with pictures that need no files of a recipe's, for the checks of trainers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hp_core.data.images.pixels import ImageTransform
from hp_core.data.protocols import Datasets
from hp_plugins.datasets.chat import chat
from hp_plugins.tokenizers.processor import PretrainedProcessor, processor
from tests.pictures import as_base64, asked, picture, save_processor, write_rows


def small_processor() -> PretrainedProcessor:
    """That of the tests."""
    with tempfile.TemporaryDirectory() as folder:
        return processor(str(save_processor(Path(folder))))


def pictured(*, fewest: int = 0, most: int = 2, tokenizer: Any, transform: Any = None, **_: Any) -> Datasets:
    """Conversations of `fewest` to `most` pictures, some of them in a row, and some to evaluate on."""
    with tempfile.TemporaryDirectory() as folder:
        splits = []
        for split in range(2):
            rows = []
            for number in range(48, 80) if split else range(48):
                count = fewest + number % (most - fewest + 1)
                images = [{"base64": as_base64(picture(seed=9 * number + i))} for i in range(count)]
                rows.append({"messages": asked(*images, f"what is {number}?", answer=f"it is {number * 7}")})
            path = write_rows(Path(folder) / f"{split}.jsonl", rows)
            read = transform or ImageTransform(tokenizer)
            made = chat(files=str(path), max_seq_len=96, num_proc=1, tokenizer=tokenizer, transform=read)
            splits.append(made.train)
        return Datasets(*splits, tokenizer=tokenizer)
