"""torch's own data loader, seeded so that neither workers nor ranks share a random stream."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, cast

import torch
from pydantic import Field
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from hp_core.data.order import StepBatches
from hp_core.data.protocols import RowDataset
from hp_core.errors import ArgumentError


def torch_loader(
    num_workers: Annotated[int, Field(ge=0, description="Processes that read ahead; 0 reads in between.")] = 0,
    pin_memory: Annotated[bool, Field(description="Copy to pinned memory, where there is an accelerator.")] = False,
    prefetch_factor: Annotated[
        Annotated[int, Field(ge=1)] | None, Field(description="Batches each worker reads ahead; null is 2.")
    ] = None,
    *,
    dataset: RowDataset,
    collate_fn: Callable[[Any], Any],
    batch_sampler: StepBatches | list[list[int]],
    seed: int,
) -> DataLoader[Any]:
    """A `DataLoader` over the given batches of row numbers.

    `num_workers` processes read ahead, `prefetch_factor` batches each (default 2). `pin_memory` has an effect
    only where there is an accelerator. Batches come in the sampler's order whatever the number of workers. The
    workers' random streams (torch, numpy, random) differ by data rank and worker, and repeat with `seed`.
    """
    if prefetch_factor is not None and num_workers == 0:
        raise ArgumentError("prefetch_factor", "has no effect without workers", "set num_workers: 1 or more")
    dp_rank = batch_sampler.dp_rank if isinstance(batch_sampler, StepBatches) else 0
    digest = hashlib.sha256(f"data loader:{seed}:{dp_rank}".encode()).digest()
    # A generator of its own: without one, torch draws the workers' seed from the global stream, and dropout would
    # depend on how often a loader was started.
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return _Loader(
        cast("Dataset[Any]", dataset),
        batch_sampler=cast("Iterable[list[int]]", batch_sampler),
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=pin_memory and torch.accelerator.is_available(),
        prefetch_factor=prefetch_factor,
        generator=generator,
    )


class _Loader(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches; end the workers at once when the reading ends, by an error too.

        Left to the garbage collector, which closes their queues first, each worker of a failed run takes torch
        five seconds to end.
        """
        batches = super().__iter__()
        try:
            yield from batches
        finally:
            if isinstance(batches, _MultiProcessingDataLoaderIter):
                batches._shutdown_workers()

    def check_worker_number_rationality(self) -> None:
        """Accept any number: one recipe serves machines of all sizes, so more workers than cores is no warning."""
