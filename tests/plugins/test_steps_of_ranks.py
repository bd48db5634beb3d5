"""Three epochs on any number of ranks, workers and rows in a micro-batch: each step has the same samples."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hp_core.data.order import GlobalOrder, Position, StepBatches
from hp_core.data.rows import WithEmptyRow
from hp_plugins.collators.rows import rows
from hp_plugins.dataloaders.torch_loader import torch_loader
from hp_plugins.datasets.sources import TextSource
from hp_plugins.datasets.text import text
from hp_plugins.tokenizers.byte_level import byte_tokenizer

EPOCHS, STEP = 3, 12


@pytest.fixture(params=["packed", "none", "mixture"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> WithEmptyRow:
    paths = []
    for name, count in (("a", 25), ("b", 12)):
        path = tmp_path / f"{name}.jsonl"
        lines = (json.dumps({"text": f"{number:03d}" * (1 + number % 4)}) for number in range(count))
        path.write_text("\n".join(lines))
        paths.append(str(path))
    common: dict[str, Any] = {"max_seq_len": 12, "cache_dir": str(tmp_path), "tokenizer": byte_tokenizer()}
    if request.param == "mixture":
        sources = {
            name: TextSource(files=path, weight=weight)
            for name, path, weight in zip("ab", paths, (1.0, 2.0), strict=True)
        }
        return text(sources=sources, **common).train
    packing = "none" if request.param == "none" else "best_fit"
    return text(files=paths, packing=packing, **common).train


def steps_of(dataset: WithEmptyRow, ranks: int, workers: int, micro: int) -> list[list[int]]:
    """The samples of each step over all ranks, sorted."""
    mixture = dataset.mixed.mixture if dataset.mixed is not None else None
    order = GlobalOrder(len(dataset), fingerprint=dataset.fingerprint, seed=5, rows_per_step=STEP, mixture=mixture)
    num_steps = order.num_steps(epochs=EPOCHS)
    found: list[list[int]] = [[] for _ in range(num_steps)]
    for rank in range(ranks):
        batches = StepBatches(order, Position(), num_steps, rank, ranks, micro)
        loader = torch_loader(workers, dataset=dataset, collate_fn=rows(), batch_sampler=batches, seed=5)
        iterator, position = iter(loader), Position()
        for step in found:
            for _ in range(batches.micro_batches(order.step_size(position))):
                step += [index for index in next(iterator)["sample_ids"].tolist() if index >= 0]
            position = order.advance(position)
        assert next(iterator, None) is None
    return [sorted(step) for step in found]


def test_steps_hold_the_same_samples(dataset: WithEmptyRow) -> None:
    expected = steps_of(dataset, 1, 0, 1)
    for ranks in (1, 2, 4):
        for workers, micro in ((0, 3), (2, 2)):
            assert steps_of(dataset, ranks, workers, micro) == expected, (ranks, workers, micro)
    per_epoch = len(expected) // EPOCHS
    for epoch in range(EPOCHS):
        of_epoch = [index for step in expected[epoch * per_epoch : (epoch + 1) * per_epoch] for index in step]
        assert len(of_epoch) == len(dataset)
        if dataset.mixed is None:
            assert of_epoch != sorted(of_epoch)
            assert sorted(of_epoch) == list(range(len(dataset)))
            continue
        # A third and two thirds of an epoch, whatever the sources' sizes.
        first = dataset.mixed.sizes[0]
        counts = Counter(index < first for index in of_epoch)
        assert (counts[True], counts[False]) == dataset.mixed.epoch_rows
