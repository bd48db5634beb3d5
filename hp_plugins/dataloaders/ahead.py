"""Reading ahead in a thread, for data that leaves the process's random streams alone."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch

Job = TypeVar("Job")
Result = TypeVar("Result")


def each_ahead(jobs: Iterable[Job], work: Callable[[Job], Result], number: int) -> Generator[Result, None, None]:
    """`work` of each job, in order, with `number` more done by a thread while a result is in use.

    If `work` draws from a global random stream (torch, numpy, random) in the first job, nothing is done ahead: what is
    drawn beside it, such as dropout, would depend on who comes first. Jobs are taken in the caller's thread. Whatever
    `work` raises is raised in its turn, and the thread ends with the iterator.
    """
    remaining = iter(jobs)
    for job in remaining:
        before = _random_states()
        first = work(job)
        if _random_states() != before:
            yield first
            yield from map(work, remaining)
        else:
            yield from _ahead(first, remaining, work, number)


def _ahead(
    first: Result, jobs: Iterator[Job], work: Callable[[Job], Result], number: int
) -> Generator[Result, None, None]:
    done: Future[Result] = Future()
    done.set_result(first)
    pending = deque([done])
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


def _random_states() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), kind, np.asarray(keys).tobytes(), *rest
