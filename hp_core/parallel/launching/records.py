"""What a rank leaves for its launcher in a folder that both know: why it failed, that it stopped, where it hangs."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hp_core.errors import EXIT_RUN_FAILED, EXIT_USER_INPUT, HpError, notes_of

LAUNCH_DIR = "HP_LAUNCH_DIR"
LAUNCHER_PID = "HP_LAUNCHER_PID"
STACK_SIGNAL = signal.SIGUSR2

LOST = "lost"
LATE = "late"
SUSPECT = "suspect"
# What gloo, NCCL and the store say when another rank has gone or doesn't come; an error that says so is a consequence.
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process exited|failed to (recv|send), got|"
    r"socket error|connectFullMesh|peer has closed|ncclRemoteError|NCCL communicator was aborted",
    re.IGNORECASE,
)
_LATE = re.compile(r"timed out|timeout|monitoredBarrier", re.IGNORECASE)
_FROM_TORCH = re.compile(r"gloo|nccl|ProcessGroup|TCPStore|DistStoreError|DistNetworkError|monitoredBarrier|c10d", re.I)


@dataclass(frozen=True)
class Failure:
    """Why one rank ended; `rank` is -1 where that says nothing.

    `place` says where in the run it was, outermost first (`step 3`, `samples 4, 7`), `text` what went wrong, with a
    traceback if that helps. `follows` is empty for a cause; `lost` when another rank had gone before, `late` when it
    didn't come, `suspect` for one that hangs if ranks of another machine say that someone does. `is_seen` says that the
    rank left no word, and `text` is what its launcher saw of it (`ended with code 3`).
    """

    rank: int
    code: int
    text: str
    time: float
    place: tuple[str, ...] = ()
    follows: str = ""
    host: str = ""
    is_seen: bool = False

    def told(self, num_others: int = 0) -> str:
        """The failure as a user reads it; `num_others` ranks ended because of it."""
        if self.code == EXIT_USER_INPUT:
            return self.text
        host = f" on {self.host}" if self.host else ""
        rank = [f"rank {self.rank}{host}"] if self.rank >= 0 else []
        who = ", ".join([*rank, *self.place])
        between = "" if not who else " " if self.is_seen else ":\n" if self.text.startswith("Traceback") else ": "
        ranks = f"{num_others} other ranks" if num_others > 1 else "1 other rank"
        others = f"\n({ranks} ended because of it)" if num_others else ""
        return f"error: {who}{between}{self.text}{others}"

    def as_json(self) -> str:
        """The failure as a line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        """The inverse of `as_json`."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "place": tuple(values["place"])})

    def on(self, host: str) -> Failure:
        """The same, known to have happened on a host."""
        return replace(self, host=host)


def failure_of(error: BaseException, rank: int = -1) -> Failure:
    """What an exception says of the rank that it ends; without a rank, of a process that is alone."""
    is_known = isinstance(error, HpError)
    code = error.exit_code if isinstance(error, HpError) else EXIT_RUN_FAILED
    text = str(error) if is_known else "".join(_without_notes(error))
    notes = [re.sub(r", rank \d+$", "", note) for note in reversed(notes_of(error))]
    # What the message begins with need not be said before it.
    place = tuple(note for note in notes if not text.startswith(f"{note}:"))
    return Failure(rank, code, text.rstrip(), time.time(), place, _follows(error))


def _without_notes(error: BaseException) -> Iterator[str]:
    """The traceback; the notes are told before it, by every version of python alike."""
    told = traceback.TracebackException.from_exception(error)
    told.__notes__ = None  # type: ignore[attr-defined]
    yield from told.format()


def _follows(error: BaseException) -> str:
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in chain:
        chain.append(one)
        one = one.__cause__ or one.__context__
    for one in chain:
        text = f"{type(one).__name__}: {one}"
        if _FROM_TORCH.search(text):
            if _LOST.search(text):
                return LOST
            if _LATE.search(text):
                return LATE
    return ""


@dataclass(frozen=True)
class LaunchFolder:
    """The folder, which is emptied before each attempt."""

    path: Path

    @classmethod
    def of_environment(cls) -> LaunchFolder | None:
        """The folder of the launcher that started this rank; None if none of ours did."""
        path = os.environ.get(LAUNCH_DIR)
        return cls(Path(path)) if path else None

    def write_failure(self, failure: Failure) -> None:
        """Leave a rank's reason."""
        self._write(f"error.{failure.rank}.json", failure.as_json())

    def write_stopped(self, rank: int) -> None:
        """Leave word that a rank has stopped on request, with a complete checkpoint."""
        self._write(f"stopped.{rank}.json", json.dumps({"rank": rank, "time": time.time()}))

    def failures(self) -> dict[int, Failure]:
        """The reasons by rank, in the order of time."""
        found = [Failure.from_json(path.read_bytes()) for path in self.path.glob("error.*.json")]
        return {one.rank: one for one in sorted(found, key=lambda one: one.time)}

    def stopped(self) -> set[int]:
        """The ranks that have stopped on request."""
        return {int(path.name.split(".")[1]) for path in self.path.glob("stopped.*.json")}

    def stack(self, rank: int) -> list[str]:
        """Where a rank was when it was asked or when it crashed, innermost call first; empty if it never said."""
        try:
            text = (self.path / f"stack.{rank}").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        return _main_thread(text)

    def clear(self) -> None:
        """Forget an attempt."""
        for path in self.path.iterdir():
            path.unlink()

    def remove(self) -> None:
        """Leave nothing behind, when the launcher ends at once."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _write(self, name: str, text: str) -> None:
        # Never half a record: the launcher may be reading.
        temporary = self.path / f".{name}"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.path / name)


def _main_thread(text: str) -> list[str]:
    """The calls of the thread that runs the program, out of all threads that faulthandler lists."""
    threads = [block.splitlines() for block in re.split(r"\n\s*\n", text) if "most recent call first" in block]
    main = [lines for lines in threads if lines[-1].rstrip().endswith("in <module>") or "in _run_code" in lines[-1]]
    lines = (main or threads or [[]])[-1]
    return [line.strip() for line in lines if line.lstrip().startswith('File "') and "<frozen" not in line]


def attend(folder: LaunchFolder, rank: int) -> None:
    """Tie this rank to its launcher: it ends with it, and says where it is when asked or when it crashes."""
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        # It may have gone before that.
        if os.getppid() != int(os.environ.get(LAUNCHER_PID, os.getppid())):
            os._exit(EXIT_RUN_FAILED)
    # Kept open for as long as the process lives: what writes to it is C code.
    stack = os.open(folder.path / f"stack.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
    faulthandler.enable(file=stack, all_threads=True)
