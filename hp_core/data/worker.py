"""A process that encodes: `python -m hp_core.data.worker`, started and fed through pipes by `hp_core.data.parallel`.

It imports nothing of the script that started the run, so that needs no main guard, and it ends when its pipe does,
however the run ends.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
import traceback
from typing import IO, Any

from hp_core.data.writing import EncodedBatch, encode_batch
from hp_core.errors import HpError

LOADED, NOT_LOADED, DONE, RAISED = "loaded", "not loaded", "done", "raised"
_SIZE = struct.Struct("<Q")


def send(file: IO[bytes], value: Any) -> None:
    """Write one value, and how long it is before it."""
    content = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    file.write(_SIZE.pack(len(content)))
    file.write(content)
    file.flush()


def receive(file: IO[bytes]) -> Any:
    """Read one value. Raises `EOFError` when the other side is gone."""
    head = file.read(_SIZE.size)
    if len(head) < _SIZE.size:
        raise EOFError("the other side has closed the pipe")
    (size,) = _SIZE.unpack(head)
    content = file.read(size)
    if len(content) < size:
        raise EOFError("the other side has closed the pipe")
    return pickle.loads(content)


def main() -> None:
    """Load the encoder, then answer each batch of rows with the encoded batch."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    # Whatever a library prints must not get between the replies.
    os.dup2(2, 1)
    try:
        sys.path[:], content = receive(requests)
        encoder = pickle.loads(content)
    except Exception as error:
        send(replies, (NOT_LOADED, f"{type(error).__name__}: {error}"))
        return
    send(replies, (LOADED, None))
    while True:
        rows = receive(requests)
        try:
            reply: tuple[str, Any] = (DONE, EncodedBatch.of(encode_batch(rows, encoder), encoder))
        except HpError as error:
            reply = (RAISED, error)
        except Exception:
            reply = (RAISED, traceback.format_exc())
        send(replies, reply)


if __name__ == "__main__":
    try:
        main()
    except (EOFError, BrokenPipeError):
        # The run has ended, in whatever way.
        os._exit(0)
