"""Parts of a run that send its process a signal at a moment of their own, once: while a trigger file is there."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hp_core.data.packing import PackedRows
from hp_core.data.protocols import Datasets, MeshContext, Sample
from hp_core.data.rows import WithEmptyRow
from hp_core.data.streaming import StreamingSource
from hp_core.data.units import Unit
from hp_core.testing.parts import NumberedRows
from hp_plugins.datasets.text import text
from hp_plugins.tokenizers.byte_level import byte_tokenizer

# Far longer than any test waits: what is stopped must not wait for it.
LONG = 100.0


def pull(trigger: Path, name: str = "SIGTERM", pid: int | None = None) -> bool:
    """Send the signal if the trigger is there, which is gone then; returns whether it was."""
    try:
        trigger.unlink()
    except FileNotFoundError:
        return False
    os.kill(pid or os.getpid(), getattr(signal, name))
    return True


class SignallingLoss(nn.Module):
    """The model's own loss; its `call`-th call in training, or in an evaluation, pulls `trigger`.RANK.

    `again` sends the signal a second time, so many seconds later, and goes on only long after.
    """

    def __init__(
        self, trigger: str, call: int, number: str = "SIGTERM", in_training: bool = True, again: float | None = None
    ) -> None:
        super().__init__()
        self.trigger, self.call, self.number, self.in_training, self.again = trigger, call, number, in_training, again
        self.count = 0

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        self.count += self.training == self.in_training
        if self.count == self.call and self.training == self.in_training:
            pulled = pull(Path(f"{self.trigger}.{dist.get_rank()}"), self.number)
            if pulled and self.again is not None:
                time.sleep(self.again)
                os.kill(os.getpid(), getattr(signal, self.number))
                time.sleep(LONG)
        return model_output.loss


class HangingLoss(nn.Module):
    """The model's own loss; its `call`-th call takes long."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call, self.count = call, 0

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count == self.call:
            print("hanging", flush=True)
            time.sleep(LONG)
        return model_output.loss


class SignallingRows(NumberedRows):
    """Rows of which the `row`-th pulls `trigger`, if it is there, and is then long in coming."""

    def __init__(self, trigger: str, row: int, num_rows: int) -> None:
        super().__init__(num_rows, 16, 96, set())
        self.trigger, self.row, self.pid = Path(trigger), row, os.getpid()

    def __getitem__(self, index: int) -> Sample:
        if index == self.row and pull(self.trigger, pid=self.pid):
            time.sleep(LONG)
        return super().__getitem__(index)


def signalling_rows(
    trigger: str, row: int, num_rows: int = 24, is_validation: bool = False, validation_rows: int = 0
) -> Datasets:
    rows = SignallingRows(trigger, row, validation_rows if is_validation else num_rows)
    if is_validation:
        return Datasets(NumberedRows(num_rows, 16, 96, set()), rows)
    return Datasets(rows, NumberedRows(validation_rows, 16, 96, set()) if validation_rows else None)


@dataclass(frozen=True)
class LongRead:
    """What a thread that reads does where it is called, if the trigger is there: the run waits, and is then stopped."""

    trigger: Path

    def __call__(self) -> None:
        if threading.current_thread() is not threading.main_thread() and self.trigger.exists():
            # By then nothing is left to do but to wait.
            time.sleep(1)
            pull(self.trigger)
            time.sleep(LONG)


class LongPacked(PackedRows):
    """Packed rows of which the last but one is long in coming."""

    long_read: LongRead

    def __getitem__(self, index: int, /) -> Sample:
        if index == len(self) - 2:
            self.long_read()
        return super().__getitem__(index)


@dataclass(frozen=True)
class LongSource:
    """A source of which one unit is long in coming."""

    source: StreamingSource
    number: int
    long_read: LongRead

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def stream_fingerprint(self) -> str:
        return self.source.stream_fingerprint

    def units(self, fields: Sequence[str], skip: int = 0) -> Iterator[Unit]:
        for number, unit in enumerate(self.source.units(fields, skip), skip):
            if number == self.number:
                self.long_read()
            yield unit


def packed_text(trigger: str, files: str, is_validation: bool = False) -> Datasets:
    """Text that a thread reads ahead, and waits for at one row, of the validation data or the training data."""
    tokenizer = byte_tokenizer()
    datasets = text(files=files, max_seq_len=16, validation_files=files, packing="none", tokenizer=tokenizer)
    rows = datasets.validation if is_validation else datasets.train
    assert isinstance(rows, WithEmptyRow)
    assert isinstance(rows.dataset, PackedRows)
    rows.dataset.__class__ = LongPacked
    rows.dataset.long_read = LongRead(Path(trigger))
    return datasets


def streamed_text(trigger: str, files: str, *, mesh_context: MeshContext) -> Datasets:
    """Text that a thread reads and encodes while the run goes on, and waits for at the thirteenth document."""
    datasets = text(
        files=files,
        max_seq_len=16,
        packing="none",
        streaming=True,
        block_documents=2,
        tokenizer=byte_tokenizer(),
        mesh_context=mesh_context,
    )
    assert isinstance(datasets.train, WithEmptyRow)
    rows = datasets.train.streamed
    assert rows is not None
    rows.stream = replace(rows.stream, source=LongSource(rows.stream.source, 12, LongRead(Path(trigger))))
    return datasets
