"""Ranks that must agree before they build anything together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hp_core.errors import InputError

if TYPE_CHECKING:
    from hp_core.parallel.setup import DistributedSetup


def require_same_everywhere(what: str, value: Any, setup: DistributedSetup) -> None:
    """Refuse to go on when the ranks don't agree about `value`.

    Raises:
        InputError: names the first rank that differs, and what both have.
    """
    values = gathered(value, setup)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise InputError(f"{what} differ between ranks: rank 0 has {values[0]}, rank {rank} has {other}")


def gathered(value: Any, setup: DistributedSetup) -> list[Any]:
    """What each rank gives, by rank; any object that can be pickled. Every rank calls it."""
    values: list[Any] = [value] * setup.world_size
    if setup.world_size > 1:
        dist.all_gather_object(values, value, group=setup.host_group)
    return values
