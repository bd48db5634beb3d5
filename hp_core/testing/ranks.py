"""Several gloo ranks in well under a second: processes forked from a server that has imported torch already."""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.context
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from hp_core.parallel.environment import ProcessEnvironment

PRELOAD = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "hp_core.training.session",
    "hp_core.testing.losses",
    "hp_core.testing.optimizers",
    "hp_core.testing.replacements",
    "hp_core.testing.trainers",
)


_Rank: TypeAlias = tuple[multiprocessing.context.ForkServerProcess, Connection]


class RankError(AssertionError):
    """A rank failed; the message holds the traceback of the first that did."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    preload: Sequence[str] = PRELOAD,
) -> list[Any]:
    """Call `function(environment, *args)` in `world_size` processes and return what each returned, by rank.

    Args:
        function: importable by name (pickled); `environment` is its `ProcessEnvironment`, for
            `hp_core.parallel.setup.distributed` or `hp_core.training.session.train`.
        timeout: seconds after which every rank is killed.
        preload: modules that the server imports; only the first call of a process can choose them.

    Raises:
        RankError: a rank raised, was killed or ran past the timeout.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    # The store lives here, so that no rank's end can take it from the others, and its port is never guessed.
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    # Taken apart in the rank itself, where a module that can't be imported is told like any other failure.
    call = pickle.dumps((function, args))
    ranks = [_start(context, call, rank, world_size, store.port) for rank in range(world_size)]
    try:
        return _collect(ranks, time.monotonic() + timeout)
    finally:
        for process, pipe in ranks:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
            pipe.close()


def _start(
    context: multiprocessing.context.ForkServerContext,
    call: bytes,
    rank: int,
    world_size: int,
    port: int,
) -> _Rank:
    receive, send = context.Pipe(duplex=False)
    environment = ProcessEnvironment(
        launcher="torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        master_port=port,
        store_is_hosted=True,
    )
    process = context.Process(target=_rank, args=(send, call, environment), daemon=False)
    process.start()
    send.close()
    return process, receive


def _rank(pipe: Connection, call: bytes, environment: ProcessEnvironment) -> None:
    torch.set_num_threads(1)
    # torch's and gloo's own code can end a process without an exception.
    faulthandler.enable()
    try:
        function, args = pickle.loads(call)
        _send(pipe, ("returned", function(environment, *args)))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        _send(pipe, ("raised", f"rank {environment.rank}: {text}"))
        pipe.close()
        # Leave at once: the others may be waiting in a collective for this rank.
        os._exit(1)


def _send(pipe: Connection, message: tuple[str, Any]) -> None:
    # Plain pickling copies tensors; multiprocessing's own would share memory with a process that is about to end.
    pipe.send_bytes(pickle.dumps(message))


def _collect(ranks: Sequence[_Rank], deadline: float) -> list[Any]:
    pipes = [pipe for _, pipe in ranks]
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        open_pipes = [pipe for index, pipe in enumerate(pipes) if index not in results]
        ready = wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [index for index in range(len(pipes)) if index not in results]
            raise RankError(f"ranks {missing} ran past the timeout")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                kind, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} ended without a word{_way_out(ranks[rank][0])}") from None
            if kind == "raised":
                raise RankError(value)
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _way_out(process: multiprocessing.context.ForkServerProcess) -> str:
    process.join(timeout=5)
    code = process.exitcode
    if code is None:
        return ""
    return f" (exit code {code})" if code >= 0 else f" ({signal.Signals(-code).name})"
