"""Every packing and length policy against the same rules said one token at a time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_core.data import pieces
from hp_core.data.best_fit import best_fit_decreasing
from hp_core.data.layout import LengthPolicy, Packing
from hp_core.data.packing import Layout, PackedRows, plan_rows
from hp_core.data.pieces import count_trained
from tests.data.test_packing import MemoryStore

EOS = 999
# What a piece holds: (token, label) of each position.
Piece = list[tuple[int, int]]


@dataclass
class Plain:
    """What the rules say, in order of the documents."""

    pieces: list[Piece] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, name: str, number: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + number


def has_target(piece: Piece) -> bool:
    return any(label != -100 for _, label in piece)


def plain_documents(documents: list[list[int]], trained: list[list[bool]], layout: Layout) -> Plain:
    """Each document after the length policy, whole."""
    plain = Plain()
    for number, (ids, mask) in enumerate(zip(documents, trained, strict=True)):
        kept, kept_mask = list(ids), list(mask)
        if len(ids) < 2:
            plain.count("short_documents" if ids else "empty_documents")
            continue
        if len(ids) > layout.max_seq_len:
            if layout.length_policy == "drop":
                plain.count("dropped_documents")
                continue
            if layout.length_policy != "split":
                kept, kept_mask = kept[: layout.max_seq_len], kept_mask[: layout.max_seq_len]
                if layout.length_policy == "truncate_eos" and kept_mask[-1]:
                    kept[-1] = EOS
        labels = [kept[place + 1] if kept_mask[place + 1] else -100 for place in range(len(kept) - 1)]
        piece = list(zip(kept, [*labels, -100], strict=True))
        if not has_target(piece):
            plain.count("untargeted_documents")
            continue
        if len(kept) < len(ids):
            plain.count("cut_documents")
            plain.count("cut_tokens", len(ids) - len(kept))
        plain.count("documents")
        plain.pieces.append(piece)
        plain.documents.append(number)
    return plain


def plain_rows(whole: Plain, layout: Layout) -> list[list[Piece]]:
    """The rows of every packing but best_fit, for which each piece is a row here."""
    rows: list[list[Piece]] = [[]]
    length = layout.max_seq_len
    if layout.packing == "sequential" and layout.length_policy == "split":
        for document in whole.pieces:
            rest = document
            while rest:
                room = length - sum(map(len, rows[-1]))
                if room:
                    rows[-1].append(rest[:room])
                    rest = rest[room:]
                else:
                    rows.append([])
        return [row for row in rows if any(map(has_target, row))]
    cut = [piece[start : start + length] for piece in whole.pieces for start in range(0, len(piece), length)]
    for piece in filter(has_target, cut):
        if layout.packing == "sequential" and sum(map(len, rows[-1])) + len(piece) <= length:
            rows[-1].append(piece)
        else:
            rows.append([piece])
    return [row for row in rows if row]


def naive_rooms(sizes: list[int], capacity: int) -> list[int]:
    """The room left in each bin by best-fit decreasing, one item at a time."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [(room, number) for number, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting)[1]] -= size
        else:
            rooms.append(capacity - size)
    return sorted(rooms)


def pieces_of(sample: Any) -> list[Piece]:
    """A row taken apart where positions restart."""
    row: list[Piece] = []
    arrays = (sample["input_ids"], sample["labels"], sample["position_ids"], sample["is_padding"])
    for token, label, position, is_padding in zip(*(one.tolist() for one in arrays), strict=True):
        if is_padding:
            assert (token, label) == (EOS, -100)
            continue
        if position == 0:
            row.append([])
        assert position == len(row[-1])
        row[-1].append((token, label))
    return row


@st.composite
def masked_documents(draw: st.DrawFn) -> tuple[list[list[int]], list[list[bool]]]:
    lengths = draw(st.lists(st.integers(0, 14), max_size=12))
    documents = [[50 * number + place for place in range(length)] for number, length in enumerate(lengths)]
    trained = [draw(st.lists(st.booleans(), min_size=length, max_size=length)) for length in lengths]
    return documents, trained


layouts = st.builds(
    Layout,
    st.integers(2, 9),
    st.sampled_from(["best_fit", "sequential", "none"]),
    st.sampled_from(["drop", "truncate", "truncate_eos", "split"]),
)


@given(data=masked_documents(), layout=layouts, is_masked=st.booleans())
def test_rows_equal_the_rules(data: tuple[list[list[int]], list[list[bool]]], layout: Layout, is_masked: bool) -> None:
    documents, trained = data
    if not is_masked:
        trained = [[True] * len(ids) for ids in documents]
    store = MemoryStore(documents, trained if is_masked else None)
    rows = PackedRows(store, plan_rows(store.lengths, layout, trained=store.trained), eos_id=EOS)
    found = [pieces_of(rows[number]) for number in range(len(rows))]
    whole = plain_documents(documents, trained, layout)
    expected = plain_rows(whole, layout)
    if layout.packing == "best_fit":
        ordered = sorted(piece for row in found for piece in row)
        assert ordered == sorted(piece for row in expected for piece in row)
        sizes = [len(piece) for piece in ordered]
        rooms = [layout.max_seq_len - sum(map(len, row)) for row in found]
        assert sorted(rooms) == naive_rooms(sizes, layout.max_seq_len)
    else:
        assert found == expected
    assert all(0 < sum(map(len, row)) <= layout.max_seq_len for row in found)
    report = rows.report.as_dict()
    for name in ("empty", "short", "dropped", "untargeted", "cut"):
        assert report[f"{name}_documents"] == whole.counts.get(f"{name}_documents", 0)
    flat = [one for row in found for piece in row for one in piece]
    assert report["documents"] == len(whole.pieces)
    assert report["tokens"] == len(flat)
    assert report["targets"] == sum(label != -100 for _, label in flat)
    assert report["cut_tokens"] == whole.counts.get("cut_tokens", 0)
    assert report["dropped_tokens"] == sum(map(len, whole.pieces)) - len(flat)
    assert report["rows"] * layout.max_seq_len == report["tokens"] + report["padding_tokens"]


@given(data=masked_documents(), length=st.integers(2, 9), packing=st.sampled_from(["best_fit", "sequential", "none"]))
def test_split_loses_no_target_and_repeats_none(
    data: tuple[list[list[int]], list[list[bool]]], length: int, packing: Packing
) -> None:
    documents, trained = data
    store = MemoryStore(documents, trained)
    rows = PackedRows(store, plan_rows(store.lengths, Layout(length, packing), trained=store.trained), eos_id=EOS)
    samples = [rows[number] for number in range(len(rows))]
    targets = [label for sample in samples for label in sample["labels"].tolist() if label != -100]
    assert sorted(targets) == sorted(
        token
        for ids, mask in zip(documents, trained, strict=True)
        for token, is_trained in zip(ids[1:], mask[1:], strict=True)
        if is_trained
    )
    tokens = [token for sample in samples for token in sample["input_ids"][~sample["is_padding"]].tolist()]
    assert len(set(tokens)) == len(tokens)


@given(sizes=st.lists(st.integers(1, 40), max_size=60), capacity=st.integers(40, 60))
def test_bins_are_those_of_best_fit_decreasing(sizes: list[int], capacity: int) -> None:
    bins = best_fit_decreasing(np.array(sizes, dtype=np.int64), capacity)
    filled = np.bincount(bins, weights=sizes).astype(int) if sizes else np.zeros(0, dtype=int)
    assert sorted((capacity - filled).tolist()) == naive_rooms(sizes, capacity)


@pytest.mark.parametrize(
    ("policy", "size", "inputs", "labels", "counts"),
    [
        ("drop", 3, [1, 2, EOS, EOS], [2, EOS, -100, -100], {}),
        ("drop", 4, [1, 2, 3, EOS], [2, 3, EOS, -100], {}),
        ("truncate", 4, [1, 2, 3, EOS], [2, 3, EOS, -100], {}),
        ("truncate", 5, [1, 2, 3, 4], [2, 3, 4, -100], {"cut_documents": 1, "cut_tokens": 1}),
        ("truncate_eos", 4, [1, 2, 3, EOS], [2, 3, EOS, -100], {}),
        ("truncate_eos", 5, [1, 2, 3, EOS], [2, 3, EOS, -100], {"cut_documents": 1, "cut_tokens": 1}),
        ("split", 4, [1, 2, 3, EOS], [2, 3, EOS, -100], {}),
        # The end token alone in a second row would have nothing to predict.
        ("split", 5, [1, 2, 3, 4], [2, 3, 4, EOS], {"dropped_tokens": 1}),
    ],
)
@pytest.mark.parametrize("packing", ["best_fit", "sequential", "none"])
def test_documents_about_as_long_as_a_row(
    policy: LengthPolicy, size: int, inputs: list[int], labels: list[int], counts: dict[str, int], packing: Packing
) -> None:
    """The padding has the id of the end token, and is told by its position."""
    store = MemoryStore([[*range(1, size), EOS]])
    rows = PackedRows(store, plan_rows(store.lengths, Layout(4, packing, policy)), eos_id=EOS)
    sample = rows[0]
    assert (sample["input_ids"].tolist(), sample["labels"].tolist()) == (inputs, labels)
    assert sample["is_padding"].tolist() == [place >= size for place in range(4)]
    named = ("cut_documents", "cut_tokens", "dropped_documents", "dropped_tokens", "untargeted_documents")
    assert {name: value for name in named if (value := rows.report.as_dict()[name])} == counts


def test_a_long_document_is_dropped_and_a_cut_answer_is_not_trained_as_nothing() -> None:
    documents = [[1, 2, 3, 4, 5], [11, 12, 13, 14, 15], [21, 22]]
    trained = [[False, False, False, False, True], [False, False, True, True, True], [False, True]]
    store = MemoryStore(documents, trained)
    drop = plan_rows(store.lengths, Layout(4, "none", "drop"), trained=store.trained).report
    assert (drop.documents, drop.dropped_documents, drop.targets) == (1, 2, 1)
    cut = plan_rows(store.lengths, Layout(4, "none", "truncate"), trained=store.trained).report
    assert (cut.documents, cut.untargeted_documents, cut.cut_documents, cut.cut_tokens) == (2, 1, 1, 1)


def test_the_end_token_replaces_only_a_trained_token() -> None:
    documents = [[1, 2, 3, 4, 5], [11, 12, 13, 14, 15]]
    trained = [[False, True, True, True, True], [False, True, False, False, True]]
    store = MemoryStore(documents, trained)
    plan = plan_rows(store.lengths, Layout(4, "none", "truncate_eos"), trained=store.trained)
    rows = PackedRows(store, plan, eos_id=EOS)
    assert [rows[number]["input_ids"].tolist() for number in (0, 1)] == [[1, 2, 3, EOS], [11, 12, 13, 14]]
    assert [rows[number]["labels"].tolist() for number in (0, 1)] == [[2, 3, EOS, -100], [12, -100, -100, -100]]


def test_weights_stand_where_their_target_is_predicted() -> None:
    documents, trained = [[1, 2, 3], [4, 5]], [[True, True, True], [False, True]]
    store = MemoryStore(documents, trained, [9, 0.5, 2, 9, 4])
    rows = PackedRows(store, plan_rows(store.lengths, Layout(6), trained=store.trained), eos_id=EOS, loss_weight=0.5)
    sample: Any = rows[0]
    assert rows.columns == ("token_weights",)
    assert sample["labels"].tolist() == [2, 3, -100, 5, -100, -100]
    assert sample["token_weights"].tolist() == [0.25, 1, 0, 2, 0, 0]
    assert sample["token_weights"].dtype == np.float32
    unweighted = MemoryStore(documents, trained)
    plan = plan_rows(unweighted.lengths, Layout(6), trained=unweighted.trained)
    halved: Any = PackedRows(unweighted, plan, eos_id=EOS, loss_weight=0.5)[0]
    assert halved["token_weights"].tolist() == [0.5, 0.5, 0, 0.5, 0, 0]


@given(mask=st.lists(st.booleans(), max_size=40), data=st.data())
def test_trained_tokens_are_counted_block_by_block(mask: list[bool], data: st.DataObject) -> None:
    places = st.integers(0, len(mask))
    ranges = data.draw(st.lists(st.tuples(places, places)))
    expected = [sum(mask[begin:end]) for begin, end in ranges]
    begins, ends = (np.array([one[side] for one in ranges], dtype=np.int64) for side in (0, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_BLOCK", data.draw(st.integers(1, 50)))
        assert count_trained(np.array(mask, dtype=bool), begins, ends).tolist() == expected


def test_fingerprints_tell_layouts_apart() -> None:
    store = MemoryStore([[1, 2, 3, 4, 5, 6], [7, 8], [9, 10]])
    layouts = [Layout(4, "none"), Layout(4, "sequential"), Layout(4, "best_fit", "truncate"), Layout(4, "none", "drop")]
    layouts.append(Layout(4, "best_fit", "truncate_eos"))
    rows = [PackedRows(store, plan_rows(store.lengths, layout), eos_id=EOS) for layout in layouts]
    weighted = PackedRows(store, plan_rows(store.lengths, layouts[0]), eos_id=EOS, loss_weight=2.0)
    assert len({one.fingerprint for one in (*rows, weighted)}) == len(layouts) + 1


def test_a_million_lengths_fill_their_rows_in_two_seconds() -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, 1_000_000).astype(np.int64)
    start = time.process_time()
    report = plan_rows(lengths, Layout(2048, "best_fit", "drop")).report
    assert time.process_time() - start < 2
    assert report.fill > 0.99
