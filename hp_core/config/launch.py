"""The recipe's `launch` section: the processes to start when nothing else starts them, here and on other machines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from hp_core.config.base import Conflict, Section

_RANGE = re.compile(r"([1-9]\d*):([1-9]\d*)")
_ENDPOINT = re.compile(r"(?:[^\s:\[\]]+|\[[0-9A-Fa-f:.%\w]+\]):(\d{1,5})")


class LaunchConfig(Section):
    """The processes to start when nothing else starts them, here and on other machines."""

    nproc: int = Field(1, ge=1, description="Processes on this machine.")
    nnodes: int | str = Field(
        1, description="Machines, each of which runs this command: a number, or `MIN:MAX` if fewer will do."
    )
    node_rank: int | None = Field(
        None, ge=0, description="This machine's number; null takes any order. All machines give one, or none."
    )
    rdzv_endpoint: str | None = Field(
        None, min_length=1, description="Where the machines meet, `HOST:PORT`, HOST being one of them."
    )
    rdzv_id: str | None = Field(
        None, min_length=1, description="What tells runs that meet at the same place apart, the same on every machine."
    )
    max_restarts: int = Field(
        0, ge=0, description="How often to start over from the newest checkpoint when a process or a machine fails."
    )
    timeout: float = Field(1800.0, gt=0, description="Seconds a collective may take before the run ends.")

    @property
    def min_nodes(self) -> int:
        """The fewest machines that the run goes on with."""
        return self._nodes[0]

    @property
    def max_nodes(self) -> int:
        """The most machines that take part."""
        return self._nodes[1]

    @property
    def num_processes(self) -> int:
        """The processes on all machines, when all take part."""
        return self.nproc * self.max_nodes

    @property
    def needs_launcher(self) -> bool:
        """Whether there is more to do than to run one process."""
        return self.num_processes > 1 or self.max_restarts > 0

    @property
    def _nodes(self) -> tuple[int, int]:
        nodes = _nodes_of(self.nnodes)
        assert nodes is not None
        return nodes

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        """Yield one for each value that says nothing, or nothing that goes with the others."""
        given = values.get("nnodes")
        nodes = _nodes_of(1 if given is None else given)
        if nodes is None:
            yield Conflict(f"{given!r} is no number of machines", "nnodes", "write 4, or 2:4 for two at least")
            return
        endpoint, node_rank = values.get("rdzv_endpoint"), values.get("node_rank")
        if nodes[1] == 1:
            for key in ("node_rank", "rdzv_endpoint", "rdzv_id"):
                if values.get(key) is not None:
                    hint = f"write nnodes: 2, or remove '{key}'"
                    yield Conflict(f"{values[key]!r} has no effect on one machine", key, hint)
            return
        if endpoint is None:
            yield Conflict(f"{given} machines need a place to meet", "nnodes", "write rdzv_endpoint: FIRST_HOST:29400")
        elif isinstance(endpoint, str):
            match = _ENDPOINT.fullmatch(endpoint)
            if match is None or not 0 < int(match.group(1)) < 65536:
                yield Conflict(f"{endpoint!r} is no HOST:PORT", "rdzv_endpoint", "write node0:29400")
        if isinstance(node_rank, int) and node_rank >= nodes[1]:
            hint = f"write a number from 0 to {nodes[1] - 1}"
            yield Conflict(f"{node_rank} is none of {nodes[1]} machines", "node_rank", hint)


def _nodes_of(value: Any) -> tuple[int, int] | None:
    """The fewest and the most machines that a value means; None if it means neither."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value, value) if value >= 1 else None
    match = _RANGE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return (int(value), int(value)) if isinstance(value, str) and re.fullmatch(r"[1-9]\d*", value) else None
    low, high = int(match.group(1)), int(match.group(2))
    return (low, high) if low <= high else None
