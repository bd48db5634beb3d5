"""Rows cut into documents, lengths in ranges, repeated documents."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hp_core.data.inspection import Segment, duplicates, histogram, shown_row
from hp_core.data.protocols import RowDataset
from hp_plugins.tokenizers.byte_level import byte_tokenizer


class _OneRow:
    def __init__(self, **arrays: list[int]) -> None:
        self.arrays = {name: np.array(values) for name, values in arrays.items()}

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, **self.arrays}


def _row(**arrays: list[int]) -> RowDataset:
    return cast(RowDataset, _OneRow(**arrays))


def test_targets_are_marked_on_the_token_that_is_predicted() -> None:
    # Document "Q?A." with its end: the answer and the end are targets. Then "hi" without any, then padding.
    dataset = _row(
        input_ids=[81, 63, 65, 46, 256, 104, 105, 256],
        labels=[-100, 65, 46, 256, -100, -100, -100, -100],
        position_ids=[0, 1, 2, 3, 4, 0, 1, 0],
        is_padding=[False, False, False, False, False, False, False, True],
    )
    row = shown_row(dataset, 7, byte_tokenizer(), ["a.jsonl:3"])
    assert (row.index, row.padding) == (7, 1)
    first, second = row.documents
    assert (first.location, first.tokens, first.trained) == ("a.jsonl:3", 5, 3)
    assert first.segments == (Segment("Q?", 2, False), Segment("A.<|endoftext|>", 3, True))
    assert (second.location, second.segments) == ("", (Segment("hi", 2, False),))


def test_without_a_tokenizer_ids_are_shown() -> None:
    row = shown_row(_row(input_ids=[5, 6], labels=[6, -100], position_ids=[0, 1]), 0, None, [])
    assert row.documents[0].segments == (Segment("5", 1, False), Segment("6", 1, True))
    assert row.as_dict() == {
        "row": 0,
        "padding": 0,
        "documents": [
            {
                "location": "",
                "segments": (
                    {"text": "5", "tokens": 1, "trained": False},
                    {"text": "6", "tokens": 1, "trained": True},
                ),
                "tokens": 2,
                "trained_tokens": 1,
            }
        ],
    }


def test_what_fits_a_row_is_apart_from_what_does_not() -> None:
    lengths = np.array([3, 5, 8, 9, 64, 65, 66, 200])
    assert histogram(lengths, 65) == [
        (2, 3, 1),
        (4, 7, 1),
        (8, 15, 2),
        (16, 31, 0),
        (32, 63, 0),
        (64, 65, 2),
        (66, 127, 1),
        (128, 200, 1),
    ]
    assert histogram(np.array([], dtype=np.int64), 8) == []


@given(st.lists(st.integers(1, 500), min_size=1), st.integers(1, 600))
def test_every_length_lies_in_one_range(lengths: list[int], limit: int) -> None:
    ranges = histogram(np.array(lengths), limit)
    assert [sum(low <= length <= high for length in lengths) for low, high, _ in ranges] == [one[2] for one in ranges]
    assert sum(count for _, _, count in ranges) == len(lengths)
    assert not any(low <= limit < high for low, high, _ in ranges)


@given(st.lists(st.integers(0, 9)))
def test_each_repetition_is_told_with_the_first_of_its_kind(kinds: list[int]) -> None:
    expected = [(kinds.index(kind), number) for number, kind in enumerate(kinds) if kinds.index(kind) != number]
    assert duplicates(np.array(kinds, dtype=np.uint64)) == expected
