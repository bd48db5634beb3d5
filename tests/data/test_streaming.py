"""Streamed rows: each document once an epoch on any ranks, workers and files, and a cursor that continues exactly."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_core.data.fields import RowText
from hp_core.data.hub import HubSource
from hp_core.data.layout import Layout
from hp_core.data.reading import Reading
from hp_core.data.sources import FileSource
from hp_core.data.streaming import BlockStream, Cursor, StreamBatches, StreamingRows
from hp_core.data.text import TextEncoder
from hp_core.errors import InputError
from hp_plugins.collators.rows import rows
from hp_plugins.dataloaders.torch_loader import torch_loader
from hp_plugins.datasets.text import text
from hp_plugins.tokenizers.byte_level import byte_tokenizer


def write(directory: Path, num_files: int, num_documents: int = 23, long: bool = False) -> list[Path]:
    """Numbered documents, dealt to files in turn; `long` ones are of many lengths, and cross rows."""
    paths = [directory / f"{number}.jsonl" for number in range(num_files)]
    for number, path in enumerate(paths):
        documents = range(number, num_documents, num_files)
        texts = [f"{one:04d}" * (1 + one % 5 if long else 1) for one in documents]
        path.write_text("".join(json.dumps({"text": text}) + "\n\n" for text in texts))
    return paths


def batches_of(
    paths: list[Path],
    *,
    rank: int = 0,
    size: int = 1,
    start: Cursor | None = None,
    num_steps: int = 1000,
    micro: int = 1,
    block: int = 4,
    seed: int = 5,
    layout: Layout | None = None,
    on_error: Any = "fail",
    max_errors: int | None = None,
) -> StreamBatches:
    encoder = TextEncoder(byte_tokenizer(), RowText.of())
    stream = BlockStream(FileSource(paths), encoder, block, rank, size)
    reading = Reading(Path("unused"), on_error=on_error, max_errors=max_errors)
    rows_of = StreamingRows(stream, layout or Layout(5, "none", "drop"), reading, eos_id=0)
    return StreamBatches(rows_of, start or Cursor(), num_steps, size * micro, micro, seed)


def read(batches: StreamBatches, count: int, workers: int = 0) -> list[tuple[int, list[int]]]:
    """The first `count` rows, in micro-batches of one: their numbers and ids."""
    loader = torch_loader(workers, dataset=batches.rows, collate_fn=rows(), batch_sampler=batches, seed=5)
    found = islice(iter(loader), count)
    return [(int(batch["sample_ids"][0]), batch["input_ids"][0].tolist()) for batch in found]


def numbers(found: list[tuple[int, list[int]]]) -> list[int]:
    return [int(byte_tokenizer().decode(ids)) for _, ids in found]


@pytest.mark.parametrize("num_files", [1, 2, 3, 7])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_each_document_comes_once_an_epoch(tmp_path: Path, num_files: int, workers: int) -> None:
    paths = write(tmp_path, num_files)
    # Of 23 documents, rank 0 of 2 has 12.
    streams = [
        numbers(read(batches_of(paths, rank=rank, size=2, num_steps=2 * count), 2 * count, workers))
        for rank, count in ((0, 12), (1, 11))
    ]
    epochs = [streams[0][:12] + streams[1][:11], streams[0][12:] + streams[1][11:]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(23))] * 2
    assert epochs[0] != epochs[1]
    assert multiprocessing.active_children() == []


def test_the_order_follows_the_seed_and_the_epoch_and_not_the_workers(tmp_path: Path) -> None:
    paths = write(tmp_path, 2, long=True)
    layout = Layout(16, "best_fit", "split")
    first = read(batches_of(paths, layout=layout, num_steps=30), 30)
    for workers in (1, 2, 3):
        assert read(batches_of(paths, layout=layout, num_steps=30), 30, workers) == first
    assert read(batches_of(paths, layout=layout, num_steps=30, seed=6), 30) != first
    assert [index for index, _ in first] == list(range(30))


@settings(max_examples=25, deadline=None)
@given(
    num_documents=st.integers(3, 17),
    num_files=st.integers(1, 3),
    block=st.integers(1, 6),
    size=st.integers(1, 2),
    stop=st.integers(0, 30),
    micro=st.integers(1, 3),
    resumed_micro=st.integers(1, 3),
    packing=st.sampled_from(["none", "sequential", "best_fit"]),
)
def test_a_stream_continues_at_any_row(
    tmp_path_factory: pytest.TempPathFactory,
    num_documents: int,
    num_files: int,
    block: int,
    size: int,
    stop: int,
    micro: int,
    resumed_micro: int,
    packing: Any,
) -> None:
    paths = write(tmp_path_factory.mktemp("stream"), num_files, num_documents, long=True)
    layout = Layout(11, packing, "split")
    for rank in range(size):
        shared: dict[str, Any] = {"rank": rank, "size": size, "block": block, "layout": layout}

        def taken(batches: StreamBatches, count: int) -> list[tuple[int, list[int]]]:
            blocks = batches.rows.stream.blocks(batches.start)
            samples = (sample for given in batches.taken_from(blocks) for sample in given)
            return [(sample["index"], sample["input_ids"].tolist()) for sample in islice(samples, count)]

        whole = taken(batches_of(paths, **shared), 40)
        before = batches_of(paths, micro=micro, **shared)
        first = taken(before, stop // micro * micro)
        again = batches_of(paths, start=before.cursor, micro=resumed_micro, **shared)
        rest = taken(again, 40 - len(first))
        assert first + rest == whole


def test_what_was_taken_is_where_the_cursor_stands(tmp_path: Path) -> None:
    paths = write(tmp_path, 1, 10)
    batches = batches_of(paths, micro=2, num_steps=6, block=4)
    cursors = []
    for _ in batches.taken_from(batches.rows.stream.blocks(batches.start)):
        cursors.append(batches.cursor)
    assert cursors == [
        Cursor(0, 0, 2, 0, 2),
        Cursor(0, 0, 4, 0, 4),
        Cursor(0, 4, 2, 0, 6),
        Cursor(0, 4, 4, 0, 8),
        Cursor(0, 8, 2, 0, 10),
        Cursor(1, 0, 2, 0, 12),
    ]
    assert len(batches) == 6


def test_lines_of_others_and_passed_blocks_are_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"{number:04d}"}) for number in range(16)]
    # Broken lines that a rank never parses: those of rank 1, and those before the cursor.
    broken = ["{" if number % 2 or number < 8 else line for number, line in enumerate(lines)]
    path.write_text("\n".join(broken))
    found = read(batches_of([path], size=2, start=Cursor(0, 4, 0), num_steps=4), 4)
    assert sorted(numbers(found)) == [8, 10, 12, 14]


def test_two_objects_on_a_line_go_to_one_rank(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "0000"}{"text": "0001"}\n{"text": "0002"}\n')
    assert sorted(numbers(read(batches_of([path], size=2, num_steps=2), 2))) == [0, 1]
    assert numbers(read(batches_of([path], rank=1, size=2, num_steps=1), 1)) == [2]


def faulty(directory: Path, faults: int = 3) -> Path:
    path = directory / "a.jsonl"
    lines = [json.dumps({"text": f"{number:04d}"}) for number in range(6)] + ["{"] * faults
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("workers", [0, 1])
def test_a_faulty_row_ends_the_run_where_it_is_reached(tmp_path: Path, workers: int) -> None:
    batches = batches_of([faulty(tmp_path)], num_steps=20, block=2)
    with pytest.raises(InputError, match=r"a\.jsonl:7: not valid JSON") as caught:
        read(batches, 20, workers)
    assert "Traceback" not in str(caught.value)


def test_faulty_rows_are_left_out_up_to_the_limit_of_an_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = faulty(tmp_path)
    batches = batches_of([path], num_steps=12, block=2, on_error="skip", max_errors=3)
    found = read(batches, 12)
    assert batches.report is not None
    assert (batches.report.documents, batches.report.faulty_rows) == (12, 3)
    assert "a.jsonl:7: not valid JSON" in caplog.text
    assert [sorted(numbers(found)[half]) for half in (np.s_[:6], np.s_[6:])] == [list(range(6))] * 2
    with pytest.raises(InputError, match=r"more faulty rows than the 2 of max_errors; the first:\n.*a\.jsonl:7"):
        read(batches_of([path], num_steps=12, block=2, on_error="skip", max_errors=2), 12)


def test_faults_before_a_cursor_count_after_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = [json.dumps({"text": f"{number:04d}"}) for number in range(4)]
    path.write_text("\n".join(["{", *good[:2], "{", *good[2:], "{"]))
    settings: dict[str, Any] = {"block": 3, "on_error": "skip", "max_errors": 2}
    batches = batches_of([path], **settings)
    assert sorted(numbers(read(batches, 4))) == [0, 1, 2, 3]
    assert batches.cursor.faulty == 1
    with pytest.raises(InputError, match="more faulty rows than the 2"):
        read(batches_of([path], start=batches.cursor, **settings), 1)


def test_streams_without_anything_are_refused(tmp_path: Path) -> None:
    paths = write(tmp_path, 1, 1)
    for workers in (0, 2):
        with pytest.raises(InputError, match="fewer documents than there are data ranks, 2: none for rank 1") as caught:
            read(batches_of(paths, rank=1, size=2), 1, workers)
        assert "Traceback" not in str(caught.value)
    with pytest.raises(InputError, match="fewer documents than there are data ranks"):
        batches_of(paths, rank=1, size=2).rows[0]
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"text": ""}\n')
    with pytest.raises(InputError, match="an epoch of data rank 0 has nothing to predict"):
        read(batches_of([empty]), 1)
    with pytest.raises(InputError, match="the documents of a data rank have nothing to predict"):
        batches_of([empty]).rows[0]


def test_a_document_that_is_not_what_its_encoder_declares_is_told(tmp_path: Path) -> None:
    class Undeclared(TextEncoder):
        def encode(self, rows: Any) -> Any:
            return [replace(one, weights=np.ones(len(one.ids), np.float32)) for one in super().encode(rows)]

    class Wide(TextEncoder):
        def encode(self, rows: Any) -> Any:
            return [replace(one, ids=one.ids + 2**32) for one in super().encode(rows)]

    batches = batches_of(write(tmp_path, 1))
    for kind, fault in ((Undeclared, "declares none"), (Wide, "don't fit four bytes")):
        encoder: Any = kind(byte_tokenizer(), RowText.of())
        with pytest.raises(ValueError, match=fault):
            next(replace(batches.rows.stream, encoder=encoder).blocks(Cursor()))


def test_the_first_row_can_be_looked_at(tmp_path: Path) -> None:
    rows_of = batches_of(write(tmp_path, 1)).rows
    assert byte_tokenizer().decode(rows_of[0]["input_ids"]) == "0000"
    with pytest.raises(IndexError):
        rows_of[1]


def test_the_fingerprint_follows_what_is_read_and_how(tmp_path: Path) -> None:
    def fingerprint(number: int, **settings: Any) -> str:
        return batches_of(write(tmp_path, number), **settings).rows.fingerprint

    base = fingerprint(1)
    assert fingerprint(1, rank=1, size=2, micro=3, seed=9) == base
    others = {fingerprint(2), fingerprint(1, block=5), fingerprint(1, layout=Layout(5, "none", "split"))}
    path = tmp_path / "0.jsonl"
    path.write_text(path.read_text().replace("0003", "0033"))
    others.add(batches_of([path]).rows.fingerprint)
    assert len(others | {base}) == 5


def test_a_data_set_of_the_hub_is_streamed_from_any_row(tmp_path: Path) -> None:
    write(tmp_path, 2, 9)
    source = HubSource(str(tmp_path), None, "train")
    every = [row for unit in source.units(("text",)) for row in unit()]
    assert [row.fields for row in every] == [{"text": f"{number:04d}"} for number in (0, 2, 4, 6, 8, 1, 3, 5, 7)]
    for skip in (1, 5, 9):
        assert [row for unit in source.units(("text",), skip) for row in unit()] == every[skip:]
    assert every[6].location == f"{tmp_path} (train): row 7"
    first = source.stream_fingerprint
    assert HubSource(str(tmp_path), None, "train").stream_fingerprint == first
    datasets = text(
        hub_id=str(tmp_path),
        streaming=True,
        max_seq_len=5,
        packing="none",
        block_documents=2,
        tokenizer=byte_tokenizer(),
    )
    streamed = datasets.train.streamed
    assert streamed is not None
    found = [numbers(read(StreamBatches(streamed, Cursor(), 9, 1, 1, 5), 9, workers)) for workers in (0, 1, 3)]
    assert sorted(found[0]) == list(range(9))
    assert found[1] == found[2] == found[0]
