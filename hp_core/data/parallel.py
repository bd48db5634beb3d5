"""Encoding in several processes, in the order of the rows."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import IO

from hp_core.data.records import DocumentEncoder, Row, Source
from hp_core.data.worker import DONE, NOT_LOADED, receive, send
from hp_core.data.writing import EncodedBatch, batches, encode_batch
from hp_core.errors import HpError, InputError, RunError

# Starting processes takes a second or more: data that is encoded sooner needs none.
PAYS_AFTER_SECONDS = 1.0
# Batches that a process has at a time, so that it needn't wait for the next.
_QUEUED = 2
# Results that wait for an earlier one, for each process: at least what one encodes while another starts.
_WAITING = 32
_TOKENIZERS_PARALLELISM = "TOKENIZERS_PARALLELISM"
# One thread each, so that the number of processes is what it says.
_ONE_THREAD = {_TOKENIZERS_PARALLELISM: "false", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
_log = logging.getLogger(__name__)

Batch = list[Row | InputError]


class CanNotLoadError(Exception):
    """A process can't have the encoder, and why."""


def encoded_batches(source: Source, encoder: DocumentEncoder, num_processes: int) -> Iterator[EncodedBatch]:
    """The source's rows encoded, in order; the same for any number of processes.

    This process is one of them. The others are started when it has worked for long enough that they pay, and are gone
    when this ends, in whatever way. An encoder that no other process can have, such as one whose class is defined in
    the script that runs, is used in this one alone, with a warning.

    Raises what the source and the encoder raise, and `RunError` for a process that dies.
    """
    rows = batches(source.rows(encoder.fields))
    started = time.monotonic()
    with _one_tokenizer_thread():
        for batch in rows:
            yield _encoded(batch, encoder)
            if num_processes > 1 and time.monotonic() - started >= PAYS_AFTER_SECONDS:
                break
        with Processes(encoder, num_processes - 1) as processes:
            waiting: deque[tuple[Batch, Future[EncodedBatch]]] = deque()
            for batch in rows:
                waiting.append((batch, processes.encode(batch)))
                while waiting and (waiting[0][1].done() or len(waiting) > _WAITING * num_processes):
                    yield processes.result(*waiting.popleft())
            while waiting:
                yield processes.result(*waiting.popleft())


def _encoded(batch: Batch, encoder: DocumentEncoder) -> EncodedBatch:
    return EncodedBatch.of(encode_batch(batch, encoder), encoder)


@contextmanager
def _one_tokenizer_thread() -> Iterator[None]:
    """Have `tokenizers` encode on one thread, whatever the user's environment says."""
    before = os.environ.get(_TOKENIZERS_PARALLELISM)
    os.environ[_TOKENIZERS_PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_TOKENIZERS_PARALLELISM, None)
        else:
            os.environ[_TOKENIZERS_PARALLELISM] = before


class Processes:
    """This process and `number` others, which are started with the first batch."""

    def __init__(self, encoder: DocumentEncoder, number: int) -> None:
        self.encoder = encoder
        self.number = number
        self.others: list[EncodingProcess] | None = None

    def encode(self, batch: Batch) -> Future[EncodedBatch]:
        """Have the batch encoded by a process that is free, or else encode it here."""
        if self.others is None:
            self.others = self._start()
        for other in self.others:
            if other.is_free:
                return other.encode(batch)
        done: Future[EncodedBatch] = Future()
        done.set_result(_encoded(batch, self.encoder))
        return done

    def result(self, batch: Batch, future: Future[EncodedBatch]) -> EncodedBatch:
        """The encoded batch, as soon as it is there."""
        try:
            return future.result()
        except CanNotLoadError as reason:
            if self.others:
                _log.warning("encoding in one process, because no other can load the encoder: %s", reason)
                self._stop()
            return _encoded(batch, self.encoder)

    def _start(self) -> list[EncodingProcess]:
        if self.number == 0:
            return []
        try:
            content = pickle.dumps(self.encoder)
        # Anything may come out of a user's class.
        except Exception as error:
            _log.warning("encoding in one process, because the encoder can't be pickled: %s", error)
            return []
        _log.info("encoding in %d processes", self.number + 1)
        return [EncodingProcess(content) for _ in range(self.number)]

    def _stop(self) -> None:
        for other in self.others or ():
            other.stop()
        self.others = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()


class EncodingProcess:
    """One other process, and the thread of this one that talks to it."""

    def __init__(self, encoder: bytes) -> None:
        paths = list(sys.path)
        own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONSAFEPATH": "1"}
        # In a session of its own, Ctrl-C is this process's to act on; it ends when its pipe does.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hp_core.data.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **_ONE_THREAD, **own},
            start_new_session=True,
        )
        self._batches: SimpleQueue[tuple[Batch, Future[EncodedBatch]] | None] = SimpleQueue()
        self._held: list[Future[EncodedBatch]] = []
        self._is_stopped = False
        self._thread = Thread(target=self._talk, args=((paths, encoder),), name="encoding", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def is_free(self) -> bool:
        """Whether it would begin with another batch soon."""
        self._held = [future for future in self._held if not future.done()]
        return len(self._held) < _QUEUED

    def encode(self, batch: Batch) -> Future[EncodedBatch]:
        """Queue a batch."""
        future: Future[EncodedBatch] = Future()
        self._held.append(future)
        self._batches.put((batch, future))
        return future

    def stop(self) -> None:
        """End the process at once; what it has not encoded is lost."""
        self._is_stopped = True
        with suppress(ProcessLookupError):
            self._process.kill()
        self._batches.put(None)
        self._thread.join()
        self._process.wait()

    def _talk(self, setup: tuple[list[str], bytes]) -> None:
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        fault = self._begin(requests, replies, setup)
        while (job := self._batches.get()) is not None:
            batch, future = job
            if fault is None:
                fault = self._exchange(requests, replies, batch, future)
            if fault is not None and not future.done():
                future.set_exception(fault)
        for file in (requests, replies):
            # What a process that has ended did not take is still in the buffer.
            with suppress(OSError):
                file.close()

    def _begin(self, requests: IO[bytes], replies: IO[bytes], setup: tuple[list[str], bytes]) -> Exception | None:
        try:
            send(requests, setup)
            kind, reason = receive(replies)
        except (OSError, EOFError):
            return self._death()
        return CanNotLoadError(reason) if kind == NOT_LOADED else None

    def _exchange(
        self, requests: IO[bytes], replies: IO[bytes], batch: Batch, future: Future[EncodedBatch]
    ) -> Exception | None:
        """Have one batch encoded; returns why no other can be."""
        try:
            send(requests, batch)
            kind, value = receive(replies)
        except (OSError, EOFError):
            return self._death()
        # What can't be pickled or unpickled is the fault of this batch alone.
        except Exception as error:
            future.set_exception(error)
            return None
        if kind == DONE:
            future.set_result(value)
        elif isinstance(value, HpError):
            future.set_exception(value)
        else:
            future.set_exception(RuntimeError(f"encoding failed in a process of its own:\n{value}"))
        return None

    def _death(self) -> Exception:
        code = self._process.wait()
        if self._is_stopped:
            return CanNotLoadError("it was stopped")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = "it may have been out of memory; a smaller num_proc needs less"
        return RunError(f"a process that encodes the data {how}; {hint}")
