"""How sources are read: where their tokens are kept, by how many processes, and what becomes of faulty rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hp_core.cpus import usable_cpus
from hp_core.errors import ArgumentError, InputError

OnError = Literal["fail", "skip"]

DEFAULT_MAX_ERRORS = 100
# So many faults are kept, and told at once.
NUM_TOLD = 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """What doesn't change a document, only how it is read.

    `num_proc` processes encode (None: as many as there are usable CPUs). `on_error: skip` leaves out up to
    `max_errors` faulty rows of each source (None: 100).
    """

    cache_dir: Path
    num_proc: int | None = None
    on_error: OnError = "fail"
    max_errors: int | None = None

    def __post_init__(self) -> None:
        if self.num_proc is not None and self.num_proc < 1:
            raise ArgumentError("num_proc", f"{self.num_proc} processes can't encode", "write 1 or more, or null")
        if self.max_errors is not None and self.on_error == "fail":
            raise ArgumentError("max_errors", "has no effect where a faulty row ends the run", "write on_error: skip")
        if self.max_errors is not None and self.max_errors < 1:
            raise ArgumentError("max_errors", f"{self.max_errors} leaves nothing to skip", "write on_error: fail")

    @property
    def num_processes(self) -> int:
        """`num_proc`, or the number of CPUs that this process may use."""
        return self.num_proc or usable_cpus()

    @property
    def limit(self) -> int:
        """How many faulty rows of a source may be left out."""
        return 0 if self.on_error == "fail" else self.max_errors or DEFAULT_MAX_ERRORS


class Faults:
    """The faulty rows of one source: how many there are, and what is wrong with the first of them."""

    def __init__(self, source_name: str, messages: tuple[str, ...] = (), count: int = 0) -> None:
        self.source_name = source_name
        self.messages = list(messages)
        self.count = count

    def add(self, fault: InputError) -> None:
        """Count one more row."""
        self.count += 1
        if len(self.messages) < NUM_TOLD:
            self.messages.append(str(fault))

    def add_all(self, messages: Sequence[str], count: int) -> None:
        """Add `count` more rows, of which the first have these messages."""
        self.count += count
        self.messages += messages[: NUM_TOLD - len(self.messages)]

    def require(self, reading: Reading) -> None:
        """Raise `InputError` with the first faults if there are more than may be left out."""
        if reading.on_error == "fail":
            self.require_none()
        if self.count <= reading.limit:
            return
        told = "\n".join(self.messages)
        raise InputError(
            f"{self.source_name}: more faulty rows than the {reading.limit} of max_errors; the first:\n{told}"
        )

    def require_none(self) -> None:
        """Raise `InputError` with the first faults if there are any."""
        if self.count:
            raise InputError(self._told)

    def log(self) -> None:
        """Say how many rows were left out, and what was wrong with the first."""
        if self.count:
            _log.warning("%s: left out %d faulty rows:\n%s", self.source_name, self.count, self._told)

    @property
    def _told(self) -> str:
        rest = f"\n… and {self.count - len(self.messages)} more" if self.count > len(self.messages) else ""
        return "\n".join(self.messages) + rest
