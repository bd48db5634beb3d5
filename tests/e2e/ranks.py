"""What several ranks of a launcher say while they run, and one of them that fails."""

from __future__ import annotations

import subprocess
import time


def read_until(process: subprocess.Popen[str], start: str) -> str:
    """What is said up to a line that starts so."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if line.startswith(start):
            return seen
    raise AssertionError(seen)


def rest(process: subprocess.Popen[str], within: float = 15.0) -> str:
    """What is still said. It ends when no process is left that could say something."""
    began = time.monotonic()
    text, _ = process.communicate(timeout=150)
    assert time.monotonic() - began < within, text
    return text


def failing(how: str, rank: int = 1, call: int = 4) -> str:
    """A loss that fails on one rank, at one of its calls in the first attempt."""
    return f"--loss_fn={{_target_: tests.e2e.parts.FailingLoss, rank: {rank}, call: {call}, how: {how}}}"
