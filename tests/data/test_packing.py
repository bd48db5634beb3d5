from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hp_core.data.packing import Layout, PackedRows, plan_rows
from hp_core.data.protocols import Sample
from hp_core.data.tokens import Meta, TokenStore
from hp_core.errors import ArgumentError
from tests.data.helpers import CharTokenizer, ListSource, store_of

PAD = 999


class MemoryStore(TokenStore):
    def __init__(
        self, documents: list[list[int]], trained: list[list[bool]] | None = None, weights: list[float] | None = None
    ) -> None:
        super().__init__(Path("memory"))
        tokens = [token for document in documents for token in document]
        has = (trained is not None, weights is not None)
        self.__dict__["meta"] = Meta("uint16", len(tokens), len(documents), (), *has, 0, ())
        self.__dict__["tokens"] = np.array(tokens, dtype=np.uint16)
        self.__dict__["lengths"] = np.array([len(document) for document in documents], dtype=np.int64)
        if trained is not None:
            self.__dict__["trained"] = np.array([one for document in trained for one in document], dtype=bool)
        if weights is not None:
            self.__dict__["weights"] = np.array(weights, dtype=np.float32)


def slow_rows(documents: list[list[int]], length: int) -> list[tuple[list[int], list[int], list[int]]]:
    """The rule said in the plainest way: one token at a time."""
    rows: list[list[tuple[int, int, int]]] = [[]]
    for document in documents:
        if len(document) < 2:
            continue
        position = 0
        for place, token in enumerate(document):
            if len(rows[-1]) == length:
                rows.append([])
                position = 0
            label = document[place + 1] if place + 1 < len(document) else -100
            rows[-1].append((token, label, position))
            position += 1
    rows = [row for row in rows if any(label != -100 for _, label, _ in row)]
    if rows:
        rows[-1] += [(PAD, -100, place) for place in range(length - len(rows[-1]))]
    return [tuple(map(list, zip(*row, strict=True))) for row in rows]  # type: ignore[misc]


def columns(sample: Sample) -> tuple[list[int], list[int], list[int]]:
    return sample["input_ids"].tolist(), sample["labels"].tolist(), sample["position_ids"].tolist()


def packed(documents: list[list[int]], length: int, selected: np.ndarray | None = None) -> PackedRows:
    store = MemoryStore(documents)
    return PackedRows(store, plan_rows(store.lengths, Layout(length), selected), eos_id=PAD)


documents_strategy = st.lists(st.integers(0, 9), max_size=12).map(
    lambda lengths: [[100 * number + place for place in range(length)] for number, length in enumerate(lengths)]
)


@given(documents=documents_strategy, length=st.integers(2, 9))
def test_rows_equal_the_slow_reference(documents: list[list[int]], length: int) -> None:
    rows = packed(documents, length)
    assert [columns(rows[number]) for number in range(len(rows))] == slow_rows(documents, length)


@given(documents=documents_strategy, length=st.integers(2, 9), data=st.data())
def test_a_selection_equals_packing_only_those_documents(
    documents: list[list[int]], length: int, data: st.DataObject
) -> None:
    selected = np.array([data.draw(st.booleans()) for _ in documents], dtype=bool)
    rows = packed(documents, length, selected)
    chosen = [document for document, is_chosen in zip(documents, selected, strict=True) if is_chosen]
    assert [columns(rows[number]) for number in range(len(rows))] == slow_rows(chosen, length)


@given(documents=documents_strategy, length=st.integers(2, 9))
def test_every_token_but_each_documents_first_is_a_target_once(documents: list[list[int]], length: int) -> None:
    rows = packed(documents, length)
    samples = [rows[number] for number in range(len(rows))]
    targets = [label for sample in samples for label in sample["labels"].tolist() if label != -100]
    expected = [token for document in documents for token in document[1:]]
    assert targets == expected
    report = rows.report
    assert report.targets == len(expected)
    assert report.tokens + report.padding_tokens == len(rows) * length
    assert report.tokens + report.dropped_tokens == sum(len(document) for document in documents if len(document) > 1)
    assert report.padding_tokens < length
    assert report.documents == sum(len(document) > 1 for document in documents)
    assert report.empty_documents == sum(len(document) == 0 for document in documents)
    assert report.short_documents == sum(len(document) == 1 for document in documents)
    for sample in samples:
        arrays = (sample["input_ids"], sample["labels"], sample["position_ids"])
        assert {array.dtype for array in arrays} == {np.dtype(np.int64)}


def test_two_documents_of_five_and_seven_tokens_have_ten_targets() -> None:
    rows = packed([list(range(10, 15)), list(range(20, 27))], 12)
    inputs, labels, positions = columns(rows[0])
    assert inputs == [10, 11, 12, 13, 14, 20, 21, 22, 23, 24, 25, 26]
    assert labels == [11, 12, 13, 14, -100, 21, 22, 23, 24, 25, 26, -100]
    assert positions == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]
    assert rows.report.targets == 10


def test_a_cut_document_keeps_the_target_across_the_cut_and_starts_again_at_zero() -> None:
    rows = packed([[1, 2, 3, 4, 5, 6]], 4)
    assert columns(rows[0]) == ([1, 2, 3, 4], [2, 3, 4, 5], [0, 1, 2, 3])
    assert columns(rows[1]) == ([5, 6, PAD, PAD], [6, -100, -100, -100], [0, 1, 0, 1])


def test_a_last_row_of_one_token_without_target_is_left_out_and_counted() -> None:
    rows = packed([[1, 2, 3, 4, 5]], 4)
    assert len(rows) == 1
    assert columns(rows[0]) == ([1, 2, 3, 4], [2, 3, 4, 5], [0, 1, 2, 3])
    assert rows.report.as_dict() == {
        "documents": 1,
        "empty_documents": 0,
        "short_documents": 0,
        "tokens": 4,
        "targets": 4,
        "rows": 1,
        "padding_tokens": 0,
        "dropped_tokens": 1,
        "dropped_documents": 0,
        "pixel_documents": 0,
        "untargeted_documents": 0,
        "cut_documents": 0,
        "cut_tokens": 0,
        "split_documents": 0,
        "faulty_rows": 0,
        "images": 0,
        "cut_images": 0,
        "fill": 1.0,
    }


@pytest.mark.parametrize("index", [-1, -2, 1, 10])
def test_only_planned_rows_exist(index: int) -> None:
    with pytest.raises(IndexError):
        packed([[1, 2]], 4)[index]


def test_a_row_needs_two_positions() -> None:
    with pytest.raises(ArgumentError, match="max_seq_len: 1 is below 2"):
        Layout(1)


def test_the_fingerprint_follows_length_and_selection() -> None:
    documents = [[1, 2, 3], [4, 5, 6]]
    first_only = np.array([True, False])
    fingerprints = {
        packed(documents, 4).fingerprint,
        packed(documents, 5).fingerprint,
        packed(documents, 4, first_only).fingerprint,
        packed(documents, 4, ~first_only).fingerprint,
    }
    assert len(fingerprints) == 4
    assert packed(documents, 4).fingerprint in fingerprints


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(st.characters(max_codepoint=900, exclude_characters="\0"), max_size=20), max_size=8))
def test_rows_decode_to_the_documents(texts: list[str], tmp_path: Path) -> None:
    tokenizer = CharTokenizer()
    store = store_of(ListSource(texts), tokenizer, tmp_path)
    rows = PackedRows(store, plan_rows(store.lengths, Layout(5)), eos_id=0)
    ids = [token for number in range(len(rows)) for token in rows[number]["input_ids"].tolist()]
    assert tokenizer.decode(ids) == "".join(texts)


def test_a_million_documents_are_planned_in_under_a_second() -> None:
    lengths = np.random.default_rng(0).integers(0, 2000, 1_000_000)
    start = time.process_time()
    plan = plan_rows(lengths, Layout(1024))
    assert time.process_time() - start < 1
    assert plan.report.targets == int((lengths[lengths > 1] - 1).sum())
