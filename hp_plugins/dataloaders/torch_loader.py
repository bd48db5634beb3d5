"""torch's own data loader, seeded so that neither workers nor ranks share a random stream."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import repeat
from typing import Annotated, Any, cast

import torch
from pydantic import Field
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from hp_core.data.order import StepBatches
from hp_core.data.protocols import RowDataset
from hp_core.data.rows import WithEmptyRow
from hp_core.data.streaming import Block, StreamBatches
from hp_core.errors import ArgumentError, InputError, RunError
from hp_core.exits import told_exit
from hp_core.training.stopping import follow_parent
from hp_plugins.collators.rows import rows
from hp_plugins.dataloaders.ahead import each_ahead

_AHEAD = 2
# The pipes of a process that is killed end a moment before it does.
_SETTLE_SECONDS = 0.5


def torch_loader(
    num_workers: Annotated[int, Field(ge=0, description="Processes that read ahead; 0 leaves it to a thread.")] = 0,
    pin_memory: Annotated[bool, Field(description="Copy to pinned memory, where there is an accelerator.")] = False,
    prefetch_factor: Annotated[
        Annotated[int, Field(ge=1)] | None,
        Field(description="Batches that each of them reads ahead; null is 2."),
    ] = None,
    *,
    dataset: RowDataset,
    collate_fn: Callable[[Any], Any],
    batch_sampler: StepBatches | StreamBatches | list[list[int]],
    seed: int,
) -> Iterable[Any]:
    """A `DataLoader` over the given batches of row numbers.

    `num_workers` processes read ahead, `prefetch_factor` batches each (default 2). Without workers, a thread of this
    process does. Rows or a collator of a plugin's own might draw from its random streams (torch, numpy, random), so
    without workers they are read in between: a run repeats. `pin_memory` has an effect only where there is an
    accelerator. Batches come in the sampler's order whatever the number of workers. The workers' random streams differ
    by data rank and worker, and repeat with `seed`. Of streamed data, workers or the thread read and encode blocks
    ahead, in the same order whatever their number.
    """
    ahead = prefetch_factor or _AHEAD
    dp_rank = 0 if isinstance(batch_sampler, list) else batch_sampler.dp_rank
    digest = hashlib.sha256(f"data loader:{seed}:{dp_rank}".encode()).digest()
    # A generator of its own: without one, torch draws the workers' seed from the global stream, and dropout would
    # depend on how often a loader was started.
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    pins = pin_memory and torch.accelerator.is_available()
    if isinstance(batch_sampler, StreamBatches):
        blocks = _Loader(
            _Blocks(batch_sampler),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            prefetch_factor=ahead if num_workers else None,
            generator=generator,
            ahead=ahead,
        )
        return StreamLoader(blocks, batch_sampler, collate_fn, pins=pins)
    draws_nothing = isinstance(dataset, WithEmptyRow) and dataset.draws_nothing and collate_fn is rows()
    if prefetch_factor is not None and num_workers == 0 and not draws_nothing:
        raise ArgumentError(
            "prefetch_factor",
            "has no effect without workers on rows or a collator of your own, which may draw random numbers",
            "set num_workers: 1 or more",
        )
    return _Loader(
        cast("Dataset[Any]", dataset),
        batch_sampler=cast("Iterable[list[int]]", batch_sampler),
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=pins,
        prefetch_factor=ahead if num_workers else None,
        generator=generator,
        ahead=ahead if draws_nothing else 0,
    )


class StreamLoader:
    """Batches of streamed rows: blocks come from workers, rows are packed and collated here."""

    def __init__(
        self,
        blocks: Iterable[Block | InputError],
        batches: StreamBatches,
        collate_fn: Callable[[Any], Any],
        *,
        pins: bool,
    ) -> None:
        self._blocks = blocks
        self._batches = batches
        self._collate_fn = collate_fn
        self._pins = pins

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        with closing(iter(self._blocks)) as blocks:
            for samples in self._batches.taken_from(map(_unless_error, blocks)):
                batch = self._collate_fn(samples)
                yield _pinned(batch) if self._pins else batch


def _pinned(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.pin_memory() for name, value in batch.items()}


class _Blocks(IterableDataset[Block | InputError]):
    """A rank's blocks; of several workers, each has every one of them that falls to it in turn.

    An `InputError` is the last value: torch would put a worker's traceback into the message of one that is raised.
    """

    def __init__(self, batches: StreamBatches) -> None:
        self._stream = batches.rows.stream
        self._start = batches.start

    def __iter__(self) -> Iterator[Block | InputError]:
        info = get_worker_info()
        # `datasets` would deal its files to workers that it finds; here every worker passes over all documents.
        torch_worker._worker_info = None
        try:
            yield from self._stream.blocks(self._start, *((0, 1) if info is None else (info.id, info.num_workers)))
        except InputError as error:
            # Of the plain kind, which can be pickled.
            yield InputError(error.problems)


def _unless_error(block: Block | InputError) -> Block:
    if isinstance(block, InputError):
        raise block
    return block


def _as_it_is(block: Block | InputError) -> Block | InputError:
    return block


def _exit_code_of_lost(batches: _MultiProcessingDataLoaderIter) -> int:
    """What a worker that is gone ended with; 0 if all are there, and what they raised is an error of their own.

    Torch says so only if it notices before it reads from a pipe, which has an end now.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    while time.monotonic() < deadline:
        codes = [worker.exitcode for worker in batches._workers]
        if lost := next((code for code in codes if code), 0):
            return lost
        time.sleep(0.02)
    return 0


class _Loader(DataLoader[Any]):
    def __init__(self, dataset: Dataset[Any], *, ahead: int, **settings: Any) -> None:
        super().__init__(dataset, worker_init_fn=follow_parent, **settings)
        self.ahead = ahead

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches; end the workers, or the thread, at once when the reading ends, by an error too.

        Left to the garbage collector, which closes their queues first, each worker of a failed run takes torch
        five seconds to end.
        """
        if self.num_workers == 0 and self.ahead:
            yield from self._by_thread()
            return
        batches = super().__iter__()
        try:
            yield from batches
        except (RuntimeError, OSError, EOFError) as error:
            code = _exit_code_of_lost(batches) if isinstance(batches, _MultiProcessingDataLoaderIter) else 0
            if not code:
                raise
            raise RunError(f"a worker process of the data loader {told_exit(code)}") from error
        finally:
            if isinstance(batches, _MultiProcessingDataLoaderIter):
                batches._shutdown_workers()

    def _by_thread(self) -> Iterator[Any]:
        if isinstance(self.dataset, IterableDataset):
            # Streams have no end.
            blocks = iter(self.dataset)
            yield from each_ahead(repeat(None), lambda _: next(blocks), self.ahead)
            return
        numbers = cast("Iterable[list[int]]", self.batch_sampler)
        with closing(each_ahead(numbers, self._read, self.ahead)) as batches:
            for batch in batches:
                # Not in the thread, which would pin on the first device, whichever is the rank's.
                yield _pinned(batch) if self.pin_memory else batch

    def _read(self, numbers: list[int]) -> Any:
        return self.collate_fn([self.dataset[number] for number in numbers])

    def check_worker_number_rationality(self) -> None:
        """Accept any number: one recipe serves machines of all sizes, so more workers than cores is no warning."""
