"""The sizes of the data axes, checked against the number of processes before any is started."""

from __future__ import annotations

from hp_core.config.models import FsdpConfig
from hp_core.errors import InputError, Problem


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
