"""Ranks that must agree before they build anything together."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hp_core.errors import InputError
from hp_core.parallel.environment import ProcessEnvironment

if TYPE_CHECKING:
    from hp_core.parallel.setup import DistributedSetup


# How long rank 0 waits for others to hear of what it is to end with.
_HEARD = timedelta(seconds=30)
_NUM_SHOWN = 8


def require_same_everywhere(what: str, value: Any, setup: DistributedSetup) -> None:
    """Refuse to go on when the ranks don't agree about `value`.

    Raises:
        InputError: names the first rank that differs, and what both have.
    """
    values = gathered(value, setup)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise InputError(f"{what} differ between ranks: rank 0 has {values[0]}, rank {rank} has {other}")


def require_same_recipes(digests: Mapping[str, str], environment: ProcessEnvironment, store: dist.Store) -> None:
    """Refuse recipes that differ before anything is built of them: ranks of other meshes would wait for one another.

    Rank 0 compares, and tells all, through the store alone.

    Args:
        digests: of what each key says.
        environment: which of how many processes this is.
        store: of this attempt of the run.

    Raises:
        InputError: on every rank; it names the first that differs, its host and the keys.
    """
    if environment.world_size == 1:
        return
    own = {"host": socket.gethostname(), "digests": dict(digests)}
    if environment.rank > 0:
        store.set(f"recipe_{environment.rank}", json.dumps(own))
        verdict = store.get("recipes").decode()
        store.set(f"told_{environment.rank}", "")
    else:
        ranks = range(1, environment.world_size)
        others = [json.loads(store.get(f"recipe_{rank}")) for rank in ranks]
        verdict = next((text for rank, other in enumerate(others, 1) if (text := _unlike(own, rank, other))), "")
        store.set("recipes", verdict)
        if verdict:
            # The store may be this rank's, and gone with it.
            with suppress(dist.DistError):
                store.wait([f"told_{rank}" for rank in ranks], _HEARD)
    if verdict:
        raise InputError(verdict)


def _unlike(own: Mapping[str, Any], rank: int, other: Mapping[str, Any]) -> str:
    """How the recipe of a rank differs from that of rank 0; empty if it doesn't."""
    names = sorted({*own["digests"], *other["digests"]})
    keys = [name for name in names if own["digests"].get(name) != other["digests"].get(name)]
    # A section that differs in a key of its own says nothing more.
    keys = [name for name in keys if not any(other_key.startswith((f"{name}.", f"{name}[")) for other_key in keys)]
    if not keys:
        return ""
    shown = ", ".join(keys[:_NUM_SHOWN]) + (f" and {len(keys) - _NUM_SHOWN} more" if len(keys) > _NUM_SHOWN else "")
    where = f"rank 0 (on {own['host']}) and rank {rank} (on {other['host']})"
    return f"recipes differ between ranks: {where} are given different {shown}"


def gathered(value: Any, setup: DistributedSetup) -> list[Any]:
    """What each rank gives, by rank; any object that can be pickled. Every rank calls it."""
    values: list[Any] = [value] * setup.world_size
    if setup.world_size > 1:
        dist.all_gather_object(values, value, group=setup.host_group)
    return values
