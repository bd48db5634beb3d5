"""Which of the ranks of this machine failed first, and what to tell of it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator, Mapping

from hp_core.errors import EXIT_RUN_FAILED
from hp_core.exits import told_exit
from hp_core.parallel.launching.processes import Processes
from hp_core.parallel.launching.records import LOST, STACK_SIGNAL, SUSPECT, Failure, LaunchFolder

# After one rank has ended, what the others meet as a consequence takes them milliseconds; python's own end, longer.
_SETTLE_SECONDS = 3.0
_ALIKE_SECONDS = 0.3
_STACK_SECONDS = 1.0
_MAX_CALLS = 25


def first_cause(processes: Processes, folder: LaunchFolder, timeout: float) -> Failure:
    """Wait until it is clear why ranks of this machine ended or hang, and return the first cause.

    What it returns is a consequence (`follows`) if the cause lies on another machine. `timeout` is what a collective
    may take, for the text.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    while processes.alive() and time.monotonic() < deadline:
        if _silent_deaths(processes, folder) or any(not one.follows for one in folder.failures().values()):
            # Ranks that fail alike do so at almost the same time.
            deadline = min(deadline, time.monotonic() + _ALIKE_SECONDS)
        time.sleep(0.02)
    deaths, records = _silent_deaths(processes, folder), folder.failures()
    violent = [rank for rank, code in deaths.items() if code < 0 and code != -signal.SIGABRT]
    if violent:
        return _death(violent[0], deaths[violent[0]], folder, records)
    causes = [one for one in records.values() if not one.follows]
    if causes:
        return min((one for one in causes if one.text == causes[0].text), key=lambda one: one.rank)
    if deaths:
        rank, code = min(deaths.items())
        return _death(rank, code, folder, records)
    alive = processes.alive()
    consequences = list(records.values())
    if alive and not any(one.follows == LOST for one in consequences[:1]):
        return _hang(alive, processes, folder, consequences, timeout)
    return _early_end(processes, folder, consequences) or consequences[0]


def _silent_deaths(processes: Processes, folder: LaunchFolder) -> dict[int, int]:
    """The exit codes of ranks that left no record."""
    known = folder.failures()
    return {rank: code for rank, code in processes.ended().items() if code and rank not in known}


def _death(rank: int, code: int, folder: LaunchFolder, others: Mapping[int, Failure]) -> Failure:
    stack = folder.stack(rank) if code < 0 else []
    where = f"; it was at (innermost call first)\n{_calls(stack)}" if stack else ""
    return _seen(rank, told_exit(code) + where, others.values())


def _early_end(processes: Processes, folder: LaunchFolder, others: Iterable[Failure]) -> Failure | None:
    """A rank that called it done while the others were at work, as `os._exit(0)` does."""
    done = [rank for rank, code in processes.ended().items() if code == 0 and rank not in folder.stopped()]
    return _seen(done[0], "ended with code 0, before the run did", others) if done else None


def _seen(rank: int, text: str, others: Iterable[Failure], follows: str = "") -> Failure:
    """What happened to a rank that left no word. Where it was is where it was waited for; not with which samples."""
    place = next((one.place[:1] for one in others), ())
    return Failure(rank, EXIT_RUN_FAILED, text, time.time(), place, follows, is_seen=True)


def _hang(alive: list[int], processes: Processes, folder: LaunchFolder, late: list[Failure], timeout: float) -> Failure:
    """The ranks that did not come to a collective which the others have given up waiting for."""
    paused = [rank for rank in alive if processes.state(rank) in ("T", "t")]
    stacks = _stacks([rank for rank in alive if rank not in paused], processes, folder)
    # A rank that waits for the one that hangs has not ended either.
    busy = {rank: stack for rank, stack in stacks.items() if not any("torch/distributed/" in line for line in stack)}
    hung = sorted([*paused, *(busy or ({} if paused else stacks))])
    told = list(_told_hung(hung, paused, stacks))
    text = f"did not come within {timeout:g} s (launch.timeout) to where the others waited; " + "\n".join(told)
    return _seen(hung[0], text, late, "" if late else SUSPECT)


def _told_hung(hung: list[int], paused: list[int], stacks: Mapping[int, list[str]]) -> Iterator[str]:
    for index, rank in enumerate(hung):
        who = "it" if index == 0 else f"rank {rank}"
        if rank in paused:
            yield f"{who} is stopped, by SIGSTOP or a debugger"
        elif stacks[rank]:
            yield f"{who} is at (innermost call first)\n{_calls(stacks[rank])}"
        else:
            yield f"{who} runs, but doesn't say where"


def _stacks(ranks: list[int], processes: Processes, folder: LaunchFolder) -> dict[int, list[str]]:
    """Where ranks are now, asked of them."""
    processes.send(STACK_SIGNAL, ranks)
    deadline = time.monotonic() + _STACK_SECONDS
    while time.monotonic() < deadline and not all(folder.stack(rank) for rank in ranks):
        time.sleep(0.02)
    # What faulthandler is still writing.
    time.sleep(0.1)
    return {rank: folder.stack(rank) for rank in ranks}


def _calls(stack: list[str]) -> str:
    more = [f"  and {len(stack) - _MAX_CALLS} more"] if len(stack) > _MAX_CALLS else []
    return "\n".join([*(f"  {line}" for line in stack[:_MAX_CALLS]), *more])
