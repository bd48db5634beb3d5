from __future__ import annotations

import json
import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hp_core.data.order import GlobalOrder, Position, StepBatches, evaluation_batches
from hp_core.data.packing import PackedRows
from hp_core.data.protocols import RowDataset
from hp_core.data.rows import WithEmptyRow
from hp_core.errors import ArgumentError, InputError
from hp_plugins.collators.rows import rows
from hp_plugins.dataloaders.ahead import each_ahead
from hp_plugins.dataloaders.torch_loader import torch_loader
from hp_plugins.datasets.text import text
from hp_plugins.tokenizers.byte_level import byte_tokenizer

RANKS = 2


class RandomRows:
    """Each row shows the random numbers its worker draws."""

    fingerprint = "random"
    max_seq_len = 3
    report = None

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == self.fails_at:
            raise InputError("row 5 is broken")
        values = np.array([random.getrandbits(30), np.random.randint(2**30), int(torch.randint(2**30, ()))])
        return {"index": index, "input_ids": values, "labels": values * 0, "position_ids": values * 0}


def numbered_files(directory: Path, num_files: int, num_samples: int = 23) -> list[str]:
    """`num_samples` documents of seven bytes and EOS, so that a row of 8 is exactly one of them."""
    paths = [directory / f"{number}.jsonl" for number in range(num_files)]
    for number, path in enumerate(paths):
        numbers = range(number, num_samples, num_files)
        path.write_text("".join(json.dumps({"text": f"{value:07d}"}) + "\n" for value in numbers))
    return list(map(str, paths))


def read(dataset: RowDataset, batches: StepBatches | list[list[int]], workers: int, seed: int = 5) -> list[list[int]]:
    """The numbers in each micro-batch, as decoded from its ids; empty rows are left out."""
    loader = torch_loader(workers, dataset=dataset, collate_fn=rows(), batch_sampler=batches, seed=seed)
    decode = byte_tokenizer().decode
    return [
        [
            int(decode(ids))
            for ids, index in zip(batch["input_ids"].tolist(), batch["sample_ids"].tolist(), strict=True)
            if index != -1
        ]
        for batch in loader
    ]


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("num_files", [1, 2, 3, 7])
def test_each_sample_comes_once_an_epoch_on_any_workers_and_files(tmp_path: Path, workers: int, num_files: int) -> None:
    files = numbered_files(tmp_path, num_files)
    dataset = text(files=files, max_seq_len=8, cache_dir=str(tmp_path), tokenizer=byte_tokenizer()).train
    order = GlobalOrder(len(dataset), fingerprint=dataset.fingerprint, seed=5, rows_per_step=8)
    ranks = [StepBatches(order, Position(), order.num_steps(epochs=2), rank, RANKS, 2) for rank in range(RANKS)]
    streams = [read(dataset, batches, workers) for batches in ranks]
    assert len(streams[0]) == len(streams[1]) == 12
    epochs = [
        [value for stream in streams for batch in stream[half] for value in batch] for half in (np.s_[:6], np.s_[6:])
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(23))] * 2
    assert epochs[0] != epochs[1]
    assert multiprocessing.active_children() == []


def test_batches_are_the_same_for_any_number_of_workers_and_follow_the_seed(tmp_path: Path) -> None:
    files = numbered_files(tmp_path, 2)
    dataset = text(files=files, max_seq_len=8, cache_dir=str(tmp_path), tokenizer=byte_tokenizer()).train

    def stream(workers: int, seed: int) -> list[list[int]]:
        order = GlobalOrder(len(dataset), fingerprint=dataset.fingerprint, seed=seed, rows_per_step=8)
        return read(dataset, StepBatches(order, Position(), 3, 0, 1, 4), workers, seed)

    assert stream(0, 5) == stream(1, 5) == stream(3, 5)
    assert stream(0, 5) != stream(0, 6)


@pytest.mark.parametrize("num_rows", [3, 5])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_get_the_same_number_of_batches_and_evaluation_uses_all_rows(
    num_rows: int, workers: int, tmp_path: Path
) -> None:
    files = numbered_files(tmp_path, 1, num_rows)
    dataset = text(files=files, max_seq_len=8, cache_dir=str(tmp_path), tokenizer=byte_tokenizer()).train
    streams = [read(dataset, evaluation_batches(len(dataset), rank, RANKS, 1), workers) for rank in range(RANKS)]
    assert [len(stream) for stream in streams] == [-(-num_rows // 2)] * 2
    assert sorted(value for stream in streams for batch in stream for value in batch) == list(range(num_rows))


def test_an_empty_row_is_only_padding(tmp_path: Path) -> None:
    dataset = text(
        files=numbered_files(tmp_path, 1, 1), max_seq_len=8, cache_dir=str(tmp_path), tokenizer=byte_tokenizer()
    ).train
    (batch,) = torch_loader(dataset=dataset, collate_fn=rows(), batch_sampler=[[0, -1]], seed=0)
    assert batch["sample_ids"].tolist() == [0, -1]
    assert (batch["labels"] != -100).sum(1).tolist() == [7, 0]
    assert batch["position_ids"][1].tolist() == list(range(8))


def draws(dp_rank: int, seed: int, workers: int = 2) -> list[list[int]]:
    order = GlobalOrder(12, fingerprint="same", seed=0, rows_per_step=12)
    batches = StepBatches(order, Position(), 1, dp_rank, 2, 3)
    dataset = WithEmptyRow(RandomRows())
    loader = torch_loader(workers, dataset=dataset, collate_fn=rows(), batch_sampler=batches, seed=seed)
    return [row for batch in loader for row in batch["input_ids"].tolist()]


def test_random_streams_differ_by_rank_and_worker_and_repeat_with_the_seed() -> None:
    first = draws(0, seed=1)
    assert draws(0, seed=1) == first
    rows_drawn = first + draws(1, seed=1) + draws(0, seed=2)
    for kind in range(3):
        assert len({row[kind] for row in rows_drawn}) == len(rows_drawn)


def test_the_global_random_stream_is_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    for _ in range(2):
        list(torch_loader(1, dataset=WithEmptyRow(RandomRows()), collate_fn=rows(), batch_sampler=[[0], [1]], seed=1))
    assert torch.equal(torch.rand(4), expected)


def test_leaving_early_or_by_an_error_ends_the_workers_at_once() -> None:
    batches = evaluation_batches(12, 0, 1, 1)
    loader = torch_loader(3, dataset=WithEmptyRow(RandomRows()), collate_fn=rows(), batch_sampler=batches, seed=1)
    for _ in loader:
        break
    assert multiprocessing.active_children() == []
    broken = torch_loader(2, dataset=WithEmptyRow(RandomRows(5)), collate_fn=rows(), batch_sampler=batches, seed=1)
    start = time.perf_counter()
    with pytest.raises(InputError, match="row 5 is broken"):
        list(broken)
    assert multiprocessing.active_children() == []
    assert time.perf_counter() - start < 4


def test_every_setting_reaches_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    def loader(**settings: Any) -> Any:
        return torch_loader(
            **settings, dataset=WithEmptyRow(RandomRows()), collate_fn=rows(), batch_sampler=[[0]], seed=1
        )

    assert loader(num_workers=2, prefetch_factor=5).prefetch_factor == 5
    assert loader(num_workers=2).num_workers == 2
    assert loader(pin_memory=True).pin_memory is torch.accelerator.is_available()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert loader(pin_memory=True).pin_memory is True
    assert loader().pin_memory is False
    with pytest.raises(ArgumentError, match=r"^prefetch_factor: has no effect without workers on rows or a collator"):
        loader(prefetch_factor=5)


class WatchedRows(PackedRows):
    """Rows that tell which have been read, and by which thread."""

    fingerprint = "watched"
    max_seq_len = 2
    report = None

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.read: list[int] = []
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == self.fails_at:
            raise InputError(f"row {index} is broken")
        self.read.append(index)
        self.threads.add(threading.current_thread().name.partition("_")[0])
        values = np.array([index, 0])
        return {"index": index, "input_ids": values, "labels": values, "position_ids": values}


def watched(dataset: WatchedRows, **settings: Any) -> Any:
    return torch_loader(
        **settings, dataset=WithEmptyRow(dataset), collate_fn=rows(), batch_sampler=[[n] for n in range(12)], seed=1
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def reading() -> int:
    """How many threads read ahead."""
    return sum(thread.name == "reading-ahead" for thread in threading.enumerate())


@pytest.mark.parametrize(("setting", "ahead"), [(None, 2), (1, 1), (5, 5)])
def test_a_thread_reads_so_many_batches_ahead_and_ends_with_the_loader(setting: int | None, ahead: int) -> None:
    dataset = WatchedRows()
    assert reading() == 0, threading.enumerate()
    batches = iter(watched(dataset, prefetch_factor=setting))
    for number in range(4):
        assert next(batches)["sample_ids"].tolist() == [number]
        wait_for(lambda last=number + ahead: dataset.read == list(range(last + 1)))
    time.sleep(0.05)
    assert dataset.read == list(range(4 + ahead))
    assert dataset.threads == {"reading-ahead"}
    batches.close()
    assert reading() == 0
    assert [batch["sample_ids"].item() for batch in watched(WatchedRows())] == list(range(12))
    assert reading() == 0


def test_an_error_comes_in_its_turn_and_ends_the_thread() -> None:
    assert reading() == 0, threading.enumerate()
    batches = iter(watched(WatchedRows(5)))
    assert [next(batches)["sample_ids"].item() for _ in range(5)] == list(range(5))
    with pytest.raises(InputError, match="row 5 is broken"):
        next(batches)
    assert reading() == 0


def test_a_loader_that_is_closed_waits_for_no_row_and_reads_no_other() -> None:
    assert reading() == 0, threading.enumerate()
    gate, begun = threading.Event(), []

    def read(number: int) -> int:
        begun.append(number)
        if number == 2:
            gate.wait(60)
        return number

    results = each_ahead(range(9), read, 3)
    assert next(results) == 0
    wait_for(lambda: begun == [0, 1, 2])
    started = time.monotonic()
    results.close()
    assert time.monotonic() - started < 10
    assert reading() == 1
    gate.set()
    wait_for(lambda: reading() == 0)
    assert begun == [0, 1, 2]


def test_an_error_keeps_its_traceback_and_jobs_are_taken_by_the_caller() -> None:
    takers = []

    def jobs() -> Iterator[int]:
        for number in range(5):
            takers.append(threading.current_thread())
            yield number

    results = each_ahead(jobs(), lambda number: 1 // (2 - number), 2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ZeroDivisionError) as caught:
        next(results)
    assert caught.traceback[-1].name == "<lambda>"
    assert set(takers) == {threading.current_thread()}


class DrawsLater(RandomRows):
    """Its first rows draw nothing."""

    def __getitem__(self, index: int) -> Any:
        if index > 2:
            return super().__getitem__(index)
        values = np.array([index, 0, 0])
        return {"index": index, "input_ids": values, "labels": values, "position_ids": values}


@pytest.mark.parametrize("kind", [RandomRows, DrawsLater])
def test_rows_that_may_draw_random_numbers_are_read_in_between(kind: type[RandomRows]) -> None:
    """Dropout and rows draw from one stream, in an order that repeats."""

    def seed() -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)

    dataset = WithEmptyRow(kind())
    seed()
    loader = torch_loader(dataset=dataset, collate_fn=rows(), batch_sampler=[[n] for n in range(12)], seed=1)
    found: list[float] = []
    for batch in loader:
        found += [*batch["input_ids"].flatten().tolist(), float(torch.rand(())), random.random()]
    seed()
    expected: list[float] = []
    for number in range(12):
        expected += [*dataset[number]["input_ids"].tolist(), float(torch.rand(())), random.random()]
    assert found == expected
