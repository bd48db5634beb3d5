"""`hp-train` that gets a SIGTERM at some moment between its first two attempts.

`python -m tests.e2e.signalled_launcher MOMENT RECIPE …`
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from hp_core.cli.main import main
from hp_core.parallel.launching.agent import RankAgent
from hp_core.parallel.launching.meeting import Meeting


def signalled(owner: Any, name: str, call: int, wait: float) -> None:
    """Have the signal come at the end of the `call`-th call of a method, and give it time to be noticed."""
    method, count = getattr(owner, name), 0

    def called(*arguments: Any) -> Any:
        nonlocal count
        result = method(*arguments)
        count += 1
        if count == call:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(wait)
        return result

    setattr(owner, name, called)


if __name__ == "__main__":
    moment = sys.argv.pop(1)
    if moment == "ending":
        signalled(RankAgent, "_stop_workers", 1, 0.5)
    elif moment == "meeting":
        signalled(Meeting, "next_rendezvous", 2, 5.0)
    else:
        signalled(RankAgent, "_start_workers", 2, 0.5)
    sys.exit(main())
