"""Two real ranks with any number of workers and files: each document once an epoch, in a new order each time."""

from __future__ import annotations

import json
import multiprocessing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from hp_core.data.order import GlobalOrder, Position, StepBatches
from hp_core.data.protocols import MeshContext
from hp_core.data.streaming import Cursor, StreamBatches
from hp_core.testing.ranks import run_ranks
from hp_plugins.collators.rows import rows
from hp_plugins.dataloaders.torch_loader import torch_loader
from hp_plugins.datasets.text import text
from hp_plugins.tokenizers.byte_level import byte_tokenizer

DOCUMENTS, EPOCHS = 24, 2
GRID = [(workers, files) for workers in (0, 1, 3) for files in (1, 2, 3, 7)]


def write(directory: Path) -> None:
    for num_files in {files for _, files in GRID}:
        folder = directory / str(num_files)
        folder.mkdir()
        for number in range(num_files):
            lines = (json.dumps({"text": f"{one:04d}"}) for one in range(number, DOCUMENTS, num_files))
            (folder / f"{number}.jsonl").write_text("\n".join(lines))


def read_here(environment: Any, directory: str, streaming: bool) -> list[list[int]]:
    """What one rank reads in two epochs, for each place of the grid; once more for its last place."""
    # A rank that was started by a server would start each worker as a new interpreter, which takes seconds.
    multiprocessing.set_start_method("fork", force=True)
    streams = []
    for workers, num_files in [*GRID, GRID[-1]]:
        datasets = text(
            files=f"{directory}/{num_files}",
            max_seq_len=5,
            packing="none",
            cache_dir=None if streaming else f"{directory}/cache",
            tokenizer=byte_tokenizer(),
            streaming=streaming,
            block_documents=4 if streaming else None,
            mesh_context=MeshContext(environment.rank, 2, environment.rank, 2),
        )
        train = datasets.train
        batches: Any
        if streaming:
            batches = StreamBatches(train.streamed, Cursor(), EPOCHS * DOCUMENTS // 2, 2, 1, 5)
        else:
            order = GlobalOrder(len(train), fingerprint=train.fingerprint, seed=5, rows_per_step=4)
            batches = StepBatches(order, Position(), order.num_steps(epochs=EPOCHS), environment.rank, 2, 1)
        loader = torch_loader(workers, dataset=train, collate_fn=rows(), batch_sampler=batches, seed=5)
        found = islice(iter(loader), EPOCHS * DOCUMENTS // 2)
        streams.append([int(byte_tokenizer().decode(batch["input_ids"][0].tolist())) for batch in found])
    return streams


@pytest.mark.parametrize("streaming", [False, True])
def test_each_document_comes_once_an_epoch(tmp_path: Path, streaming: bool) -> None:
    write(tmp_path)
    first, second = run_ranks(read_here, 2, str(tmp_path), streaming)
    half = DOCUMENTS // 2
    for one, two in zip(first, second, strict=True):
        epochs = [one[:half] + two[:half], one[half:] + two[half:]]
        assert [sorted(epoch) for epoch in epochs] == [list(range(DOCUMENTS))] * EPOCHS
        assert epochs[0] != epochs[1]
        assert one != two
    # The workers change nothing, and the seed brings the same again.
    num_files = len(GRID) // 3
    for place in range(num_files):
        assert first[place] == first[place + num_files] == first[place + 2 * num_files]
    assert first[-1] == first[-2]
