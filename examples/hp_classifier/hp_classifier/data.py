"""Labelled texts in JSON Lines, one of them a row."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from hp_core import ArgumentError, Datasets, InputError, Problem, Tokenizer

_NUM_SHOWN = 10


@dataclass(frozen=True)
class LabelledText:
    """A text, and the number of its label."""

    text: str
    label: int


class LabelledRows:
    """A row for each text: its tokens, then padding, and one label."""

    report = None

    def __init__(
        self, texts: Sequence[LabelledText], ids: Sequence[Sequence[int]], max_seq_len: int, tokenizer: Tokenizer
    ) -> None:
        self._texts, self._ids, self._pad_id = texts, ids, tokenizer.eos_id
        self.max_seq_len = max_seq_len
        told = json.dumps([tokenizer.fingerprint, max_seq_len, [(one.text, one.label) for one in texts]])
        self.fingerprint = hashlib.sha256(told.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self._ids[index][: self.max_seq_len]
        padding = self.max_seq_len - len(ids)
        return {
            "index": index,
            "input_ids": np.array([*ids, *[self._pad_id] * padding], dtype=np.int64),
            "position_ids": np.arange(self.max_seq_len),
            "is_padding": np.arange(self.max_seq_len) >= len(ids),
            "labels": np.array([self._texts[index].label], dtype=np.int64),
        }


def labelled(
    *,
    files: Annotated[str, Field(description="JSON Lines files with `text` and `label`, a path or a pattern.")],
    labels: Annotated[list[str], Field(min_length=2, description="Every label, in the order of the model's.")],
    max_seq_len: Annotated[int, Field(ge=1, description="The most tokens of a text.")],
    too_long: Annotated[
        Literal["error", "cut"], Field(description="What becomes of longer texts: an error, or their end is cut.")
    ] = "error",
    validation_fraction: Annotated[
        float,
        Field(ge=0, lt=1, description="The share of texts to evaluate on, chosen by the texts alone."),
    ] = 0.0,
    tokenizer: Tokenizer,
) -> Datasets:
    """Read labelled texts.

    Raises:
        ArgumentError: no file is there, or a text is too long.
        InputError: rows that are not of this kind, with file and line, all at once.
    """
    if len(set(labels)) < len(labels):
        raise ArgumentError("labels", f"a label is given twice: {labels}")
    paths = sorted(glob.glob(files))
    if not paths:
        raise ArgumentError("files", f"no file matches {files!r}")
    texts = _read([Path(path) for path in paths], labels)
    train, validation = _split(texts, validation_fraction)

    def rows(part: list[LabelledText]) -> LabelledRows:
        ids = tokenizer.encode_batch([one.text for one in part])
        longest = max(map(len, ids), default=0)
        if longest > max_seq_len and too_long == "error":
            number = sum(len(one) > max_seq_len for one in ids)
            message = f"{number} of {len(ids)} texts are longer than {max_seq_len} tokens, the longest has {longest}"
            raise ArgumentError("max_seq_len", message, f"write max_seq_len: {longest}, or too_long: cut")
        return LabelledRows(part, ids, max_seq_len, tokenizer)

    return Datasets(rows(train), rows(validation) if validation else None, tokenizer=tokenizer)


def _read(paths: Sequence[Path], labels: Sequence[str]) -> list[LabelledText]:
    texts: list[LabelledText] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            with path.open(encoding="utf-8") as file:
                lines = list(file)
        except (OSError, UnicodeDecodeError) as error:
            problems.append(Problem(f"{path}: can't be read: {error}", path="dataset.files"))
            continue
        for number, line in enumerate(lines, 1):
            try:
                texts.append(_labelled_text(line, labels))
            except ValueError as error:
                problems.append(Problem(f"{path}:{number}: {error}", path="dataset.files"))
    if problems:
        more = len(problems) - _NUM_SHOWN
        rest = [Problem(f"{more} more rows like these", path="dataset.files")] if more > 0 else []
        raise InputError([*problems[:_NUM_SHOWN], *rest])
    return texts


def _labelled_text(line: str, labels: Sequence[str]) -> LabelledText:
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("text"), str) or "label" not in row:
        raise ValueError('expected {"text": "…", "label": "…"}')
    if not row["text"]:
        raise ValueError("the text is empty")
    if row["label"] not in labels:
        raise ValueError(f"the label {row['label']!r} is none of {', '.join(labels)}")
    return LabelledText(row["text"], labels.index(row["label"]))


def _split(texts: Sequence[LabelledText], fraction: float) -> tuple[list[LabelledText], list[LabelledText]]:
    """Training and validation texts; the same text is never in both."""
    parts: tuple[list[LabelledText], list[LabelledText]] = ([], [])
    for one in texts:
        place = int.from_bytes(hashlib.sha256(one.text.encode()).digest()[:8], "big") / 2**64
        parts[place < fraction].append(one)
    return parts
