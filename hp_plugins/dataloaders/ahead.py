"""Reading ahead in a thread, for data that leaves the process's random streams alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

from hp_core.threads import LooseThread

Job = TypeVar("Job")
Result = TypeVar("Result")

# A thread that is merely busy is gone by then; one that waits for a disk or a network may take minutes.
_PATIENCE_SECONDS = 0.5


def each_ahead(jobs: Iterable[Job], work: Callable[[Job], Result], number: int) -> Generator[Result, None, None]:
    """`work` of each job, in order, with `number` more done by a thread while a result is in use.

    `work` must not draw from a global random stream: what is drawn beside it, such as dropout, would depend on who
    comes first. Jobs are taken in the caller's thread. Whatever `work` raises is raised in its turn, and the thread
    ends with the iterator. One that is closed before its end doesn't wait for a job that takes long: the thread is
    let go, and takes no other job.
    """
    tasks: SimpleQueue[Callable[[], Result] | None] = SimpleQueue()
    outcomes: SimpleQueue[_Done[Result] | _Raised] = SimpleQueue()
    is_closed = threading.Event()

    def let_go() -> None:
        is_closed.set()
        tasks.put(None)

    # What is still open when a script ends is closed by nobody else.
    thread = LooseThread(partial(_do_all, tasks, outcomes, is_closed), "reading-ahead", let_go)
    thread.start()
    num_pending = 0
    try:
        for job in jobs:
            tasks.put(partial(work, job))
            num_pending += 1
            if num_pending > number:
                num_pending -= 1
                yield _result(outcomes.get())
        for _ in range(num_pending):
            yield _result(outcomes.get())
    finally:
        let_go()
        # The garbage collector, which closes what is forgotten, works in any thread.
        if thread is not threading.current_thread():
            thread.join(_PATIENCE_SECONDS)


@dataclass(frozen=True)
class _Done(Generic[Result]):
    value: Result


@dataclass(frozen=True)
class _Raised:
    error: BaseException


def _do_all(
    tasks: SimpleQueue[Callable[[], Result] | None],
    outcomes: SimpleQueue[_Done[Result] | _Raised],
    is_closed: threading.Event,
) -> None:
    while (task := tasks.get()) is not None and not is_closed.is_set():
        # In a function of its own: a result must not stay here while the thread waits.
        outcomes.put(_outcome(task))


def _outcome(task: Callable[[], Result]) -> _Done[Result] | _Raised:
    try:
        return _Done(task())
    except BaseException as error:
        return _Raised(error)


def _result(outcome: _Done[Result] | _Raised) -> Result:
    if isinstance(outcome, _Done):
        return outcome.value
    try:
        raise outcome.error
    finally:
        # The error's traceback refers to this frame.
        del outcome
