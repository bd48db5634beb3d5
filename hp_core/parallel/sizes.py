"""The sizes of the data axes, checked against the number of processes before any is started."""

from __future__ import annotations

from collections.abc import Iterator

from hp_core.config.models import FsdpConfig, TrainerConfig
from hp_core.errors import InputError, Problem


def check_sizes(config: TrainerConfig, world_size: int) -> None:
    """Refuse sizes that don't fit `world_size` ranks, all of them at once.

    Raises:
        InputError: with what would work, for each.
    """
    problems = list(_problems(config, world_size))
    if problems:
        raise InputError(problems)


def _problems(config: TrainerConfig, world_size: int) -> Iterator[Problem]:
    try:
        data_sizes(config.fsdp_config, world_size)
    except InputError as error:
        yield from error.problems
    training = config.training
    share = world_size * training.micro_batch_size
    if training.global_batch_size % share:
        below = training.global_batch_size // share * share
        works = f"{below} or {below + share}" if below else f"{share}"
        yield Problem(
            f"{training.global_batch_size} rows can't be cut into micro-batches of {training.micro_batch_size} on "
            f"{world_size} rank{'s' * (world_size > 1)}",
            path="training.global_batch_size",
            hint=f"use a multiple of {share}: {works}",
        )


def data_sizes(config: FsdpConfig, world_size: int) -> tuple[int, int]:
    """`(dp_replicate_size, dp_shard_size)` for `world_size` ranks.

    Raises:
        InputError: the product is not the world size; the message lists what would work.
    """
    replicate = config.dp_replicate_size
    shard = config.dp_shard_size
    if shard is None and world_size % replicate == 0:
        shard = world_size // replicate
    if shard is None or replicate * shard != world_size:
        works = ", ".join(f"{n} x {world_size // n}" for n in range(1, world_size + 1) if world_size % n == 0)
        written = f"dp_replicate_size {replicate}" + ("" if shard is None else f" x dp_shard_size {shard}")
        raise InputError(
            Problem(
                f"{written} does not make {world_size} ranks",
                path="fsdp_config",
                hint=f"replicate x shard that would: {works}",
            )
        )
    return replicate, shard
