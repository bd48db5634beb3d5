"""Reading ahead in a thread, for data that leaves the process's random streams alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


def each_ahead(jobs: Iterable[Job], work: Callable[[Job], Result], number: int) -> Generator[Result, None, None]:
    """`work` of each job, in order, with `number` more done by a thread while a result is in use.

    `work` must not draw from a global random stream: what is drawn beside it, such as dropout, would depend on who
    comes first. Jobs are taken in the caller's thread. Whatever `work` raises is raised in its turn, and the thread
    ends with the iterator.
    """
    pending: deque[Future[Result]] = deque()
    executor = ThreadPoolExecutor(1, thread_name_prefix="reading-ahead")
    try:
        for job in jobs:
            pending.append(executor.submit(work, job))
            if len(pending) > number:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
