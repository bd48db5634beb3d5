"""Rows of sources that are too large to encode beforehand: read, encoded and packed block by block, and resumable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hp_core.data.fingerprint import fingerprint
from hp_core.data.images.pixels import ImageTransform
from hp_core.data.images.table import ImageTable
from hp_core.data.layout import Layout
from hp_core.data.order import Position
from hp_core.data.packing import WEIGHTS, PackedRows, plan_rows
from hp_core.data.protocols import DataReport, Sample
from hp_core.data.reading import NUM_TOLD, Faults, Reading
from hp_core.data.records import DocumentEncoder
from hp_core.data.shuffling import shuffled
from hp_core.data.units import Unit
from hp_core.data.writing import EncodedBatch, batches, encode_batch
from hp_core.errors import InputError

DEFAULT_BLOCK_DOCUMENTS = 10_000
_RULE_VERSION = 1


@runtime_checkable
class StreamingSource(Protocol):
    """Rows that are read in order, from any of them on, without reading or hashing all beforehand."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def stream_fingerprint(self) -> str:
        """A hash of what tells cheaply that it is the same source."""
        ...

    def units(self, fields: Sequence[str], skip: int = 0) -> Iterator[Unit]:
        """What is dealt to ranks as one: rows, or lines that are not parsed until they are called; without the first
        `skip`."""
        ...


@dataclass(frozen=True)
class Cursor:
    """Where one data rank stands in its stream, after `taken` rows of the whole run.

    `documents` of the rank's own come before its present block in this `epoch`, `rows` of the block are taken, and
    `faulty` rows of the sources were left out in the epoch before it.
    """

    epoch: int = 0
    documents: int = 0
    rows: int = 0
    faulty: int = 0
    taken: int = 0


@dataclass(frozen=True, eq=False)
class Block:
    """Some documents of one rank, encoded: what packing takes (`Documents`), and what was faulty among them.

    `begin` is the number of the rank's documents before it in its `epoch`.
    """

    epoch: int
    begin: int
    lengths: NDArray[np.int64]
    tokens: NDArray[np.unsignedinteger]
    trained: NDArray[np.bool_] | None
    weights: NDArray[np.float32] | None
    values: NDArray[np.float32]
    columns: tuple[str, ...]
    faults: tuple[str, ...]
    num_faults: int
    images: ImageTable | None = None

    @property
    def key(self) -> str:
        """Rows of a block have no fingerprint of their own."""
        return ""

    def locate(self, document: int) -> str:
        """Its number in the rank's epoch, from 1: where a document stands in its files isn't kept."""
        return f"document {self.begin + document + 1:,} of the stream"


@dataclass(frozen=True)
class BlockStream:
    """The documents of data rank `rank` of `size`, in blocks: of all documents, every `size`-th.

    Endless: after the last document of an epoch follows the first again. What is a document here is a line of JSON
    lines, however many objects it holds, or else a row.
    """

    source: StreamingSource
    encoder: DocumentEncoder
    block_documents: int
    rank: int = 0
    size: int = 1

    def blocks(self, start: Cursor, worker: int = 0, num_workers: int = 1) -> Iterator[Block]:
        """Of the blocks from `start` on, every `num_workers`-th, from the `worker`-th.

        Others are passed over without being parsed. Raises `InputError` for a source with fewer documents than ranks.
        """
        epoch, begin, number = start.epoch, start.documents, 0
        while True:
            own = islice(self.source.units(self.encoder.fields, begin * self.size), self.rank, None, self.size)
            while (first := next(own, None)) is not None:
                units = islice(own, self.block_documents - 1)
                if number % num_workers == worker:
                    held = [first, *units]
                    yield self._encoded(epoch, begin, held)
                    count = len(held)
                else:
                    count = 1 + sum(1 for _ in units)
                begin, number = begin + count, number + 1
            if begin == 0:
                raise InputError(
                    f"{self.source.name}: it has fewer documents than there are data ranks, {self.size}: none for rank"
                    f" {self.rank}"
                )
            epoch, begin = epoch + 1, 0

    def _encoded(self, epoch: int, begin: int, units: Iterable[Unit]) -> Block:
        rows = chain.from_iterable(unit() for unit in units)
        placed = [one for batch in batches(rows) for one in encode_batch(batch, self.encoder)]
        held = EncodedBatch.of(placed, self.encoder)
        return Block(
            epoch,
            begin,
            held.lengths,
            held.ids,
            held.trained,
            held.weights,
            held.values,
            tuple(self.encoder.columns),
            faults=tuple(str(one) for one in held.faults[:NUM_TOLD]),
            num_faults=len(held.faults),
            images=held.images,
        )


class StreamingRows:
    """The rows of a stream, of which only the first can be looked at: their number is not known."""

    report: DataReport | None = None

    def __init__(
        self,
        stream: BlockStream,
        layout: Layout,
        reading: Reading,
        *,
        eos_id: int,
        transform: ImageTransform | None = None,
    ) -> None:
        self.stream = stream
        self.layout = layout
        self.reading = reading
        self.eos_id = eos_id
        self.transform = transform
        self.max_seq_len = layout.max_seq_len

    @cached_property
    def fingerprint(self) -> str:
        """Depends on what the source says of itself, the encoder, the layout and the blocks, not on ranks."""
        layout: list[str | int] = [self.layout.max_seq_len, self.layout.packing, self.layout.length_policy]
        encoder = self.stream.encoder.fingerprint
        source = self.stream.source.stream_fingerprint
        blocks = [self.stream.block_documents]
        if self.layout.max_row_pixels is not None:
            blocks.append(self.layout.max_row_pixels)
        return fingerprint("stream", _RULE_VERSION, source, encoder, *layout, *blocks)

    @property
    def columns(self) -> tuple[str, ...]:
        """The arrays that its rows have beside those of every row."""
        own = tuple(self.stream.encoder.columns)
        return (*own, WEIGHTS) if self.stream.encoder.has_weights else own

    @property
    def has_images(self) -> bool:
        """Whether rows may have images; which do isn't known."""
        return self.stream.encoder.has_images

    def packed(self, block: Block) -> PackedRows:
        """The rows of a block."""
        loss_weight = 1.0 if self.stream.encoder.has_weights else None
        images = None if block.images is None else block.images.records
        plan = plan_rows(block.lengths, self.layout, None, block.trained, images)
        return PackedRows(block, plan, eos_id=self.eos_id, loss_weight=loss_weight, transform=self.transform)

    def first_block(self) -> PackedRows:
        """The rows of the first block of this rank, for a look. Raises `InputError` for faulty rows, as a run does."""
        block = next(self.stream.blocks(Cursor()))
        faults = Faults(self.stream.source.name)
        faults.add_all(block.faults, block.num_faults)
        faults.require(self.reading)
        return self.packed(block)

    @cached_property
    def _first(self) -> Sample:
        # Small blocks: a look should not cost ten thousand documents.
        peek = replace(self.stream, block_documents=min(16, self.stream.block_documents))
        seen: list[DataReport] = []
        for block in peek.blocks(Cursor()):
            if block.epoch:
                break
            if self.reading.on_error == "fail" and block.num_faults:
                raise InputError("\n".join(block.faults))
            rows = self.packed(block)
            if len(rows):
                return rows[0]
            seen.append(rows.report)
        left_out = DataReport.total(seen).told() if seen else ""
        raise InputError(f"{self.stream.source.name}: the documents of a data rank have nothing to predict{left_out}")

    def __getitem__(self, index: int, /) -> Sample:
        """A row like those that come: the first documents', and no other."""
        if index != 0:
            raise IndexError(f"row {index} of a stream can't be looked at")
        return self._first


@dataclass
class StreamBatches:
    """One rank's micro-batches of a stream from `start` on, for `num_steps` steps of `rows_per_step` on all ranks.

    `cursor` says where the rank stands after the micro-batch that was given last. `report` tells what became of the
    documents of all blocks since the start.
    """

    rows: StreamingRows
    start: Cursor
    num_steps: int
    rows_per_step: int
    micro_batch_size: int
    seed: int
    cursor: Cursor = field(init=False)
    report: DataReport | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.cursor = self.start

    @property
    def dp_rank(self) -> int:
        """The number of the data rank."""
        return self.rows.stream.rank

    def micro_batches(self, num_rows: int) -> int:
        """How many micro-batches each rank runs in a step of `num_rows` rows."""
        return num_rows // (self.rows.stream.size * self.micro_batch_size)

    def __len__(self) -> int:
        return self.num_steps * self.micro_batches(self.rows_per_step)

    def told(self, position: Position) -> str:
        """Where this rank stands in its documents, for an error."""
        del position
        return f"streamed documents from number {self.cursor.documents} of epoch {self.cursor.epoch}"

    def taken_from(self, blocks: Iterable[Block]) -> Iterator[list[Sample]]:
        """The rows of each micro-batch, out of blocks that begin with the one at `start`.

        Raises `InputError` for faulty rows, as the reading's `on_error` says, and an epoch without anything to predict.
        """
        rows = self._rows(blocks)
        for _ in range(len(self)):
            yield list(islice(rows, self.micro_batch_size))

    def _rows(self, blocks: Iterable[Block]) -> Iterator[Sample]:
        stream, skipped = self.rows.stream, self.start.rows
        faults = Faults(stream.source.name, count=self.start.faulty)
        # An epoch that is resumed within has had rows.
        epoch, is_empty = self.start.epoch, self.start.documents == self.start.rows == 0
        for block in blocks:
            if block.epoch != epoch:
                if is_empty:
                    raise InputError(
                        f"{stream.source.name}: an epoch of data rank {stream.rank} has nothing to predict"
                    )
                faults, epoch, is_empty = Faults(stream.source.name), block.epoch, True
            before = faults.count
            faults.add_all(block.faults, block.num_faults)
            faults.require(self.rows.reading)
            # At once: an epoch of a stream may never end.
            Faults(stream.source.name, block.faults, block.num_faults).log()
            packed = self.rows.packed(block)
            report = replace(packed.report, faulty_rows=block.num_faults)
            self.report = report if self.report is None else DataReport.total([self.report, report])
            is_empty = is_empty and not len(packed)
            order = self._order(block, len(packed))
            for number in range(skipped, len(packed)):
                taken = self.cursor.taken
                self.cursor = Cursor(epoch, block.begin, number + 1, before, taken + 1)
                yield {**packed[int(order[number])], "index": taken * stream.size + stream.rank}
            skipped = 0

    def _order(self, block: Block, count: int) -> NDArray[np.int64]:
        stream = self.rows.stream
        number = block.begin // stream.block_documents
        return shuffled(f"{self.rows.fingerprint}:{self.seed}:{block.epoch}:rank {stream.rank}:block {number}", count)


class StreamOrder:
    """Steps over a stream: all of one size, without an end. The epoch is that of this rank."""

    def __init__(self, batches: StreamBatches) -> None:
        self.rows_per_step = batches.rows_per_step
        self._batches = batches

    def step_size(self, position: Position) -> int:
        """How many rows the step at `position` has."""
        del position
        return self.rows_per_step

    def advance(self, position: Position) -> Position:
        """The position after the step at `position`."""
        return Position(position.consumed + self.rows_per_step, self._batches.cursor.epoch, 0)

    def num_steps(self, *, iters: int | None = None, samples: int | None = None, epochs: int | None = None) -> int:
        """How many steps a whole run takes; only steps can be asked for, as nothing else has a known length."""
        if iters is None:
            raise ValueError(f"a stream has no length to count {samples} samples or {epochs} epochs by")
        return iters
