"""Starting the processes of a run on this host through torch's elastic launcher, and saying why they ended."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
from torch.distributed.launcher.api import elastic_launch

from hp_core.config.models import LaunchConfig
from hp_core.errors import EXIT_RUN_FAILED
from hp_core.parallel.setup import default_threads


@dataclass(frozen=True)
class Failure:
    """How one rank ended, as it wrote down itself."""

    rank: int
    code: int
    text: str
    time: float


def launch(command: list[str], config: LaunchConfig) -> int:
    """Run `command` in `config.nproc` processes and return the exit code of the run.

    The rank that failed first speaks, once; what follows from it in the other ranks is not shown.
    """
    _quieten_the_launcher()
    threads = os.environ.get("OMP_NUM_THREADS") or str(default_threads(config.nproc))
    with tempfile.TemporaryDirectory(prefix="hp-train-") as folder:
        os.environ["HP_ERROR_FILE"] = str(Path(folder) / "error")
        os.environ["OMP_NUM_THREADS"] = threads
        elastic = ElasticConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=config.nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=Std.NONE, tee=Std.NONE),
        )
        try:
            elastic_launch(elastic, command[0])(*command[1:])
            return 0
        except ChildFailedError as error:
            return _explain(error, Path(folder))
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            return 128 + int(error.sigval)
        finally:
            del os.environ["HP_ERROR_FILE"]


def _quieten_the_launcher() -> None:
    """Keep the elastic agent's own account of a failure off the terminal: the first cause is told once, below."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def write_error(path: Path, rank: int, code: int, text: str) -> None:
    """Leave a rank's reason for the launcher."""
    value = {"rank": rank, "code": code, "text": text, "time": time.time()}
    path.with_name(f"{path.name}.{rank}").write_text(json.dumps(value), encoding="utf-8")


def _explain(error: ChildFailedError, folder: Path) -> int:
    failures = sorted(
        (Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("error.*")),
        key=lambda failure: failure.time,
    )
    if failures:
        # A user's mistake fails on every rank; a broken connection is only ever a consequence.
        first = next((failure for failure in failures if failure.code != EXIT_RUN_FAILED), failures[0])
        prefix = "" if first.code != EXIT_RUN_FAILED else f"error: rank {first.rank}: "
        print(f"{prefix}{first.text}", file=sys.stderr)
        return first.code
    rank, process = error.get_first_failure()
    how = f"was ended by signal {-process.exitcode}" if process.exitcode < 0 else f"ended with code {process.exitcode}"
    print(f"error: rank {rank} {how} without a word", file=sys.stderr)
    return EXIT_RUN_FAILED
