"""Processes that train by turns, a step each, so that whatever else the machine does hits all of them alike.

The one that isn't having its turn waits for a line on a socket and takes no processor time.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

_SOCKET = "HP_BENCHMARK_TURNS"
_END = "end"


class Turn:
    """A contender's side. The first step begins with the process, each other one when the turn comes back."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[_SOCKET])
        self._in, self._out = self._socket.makefile("r"), self._socket.makefile("w")
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def done(self, loss: float | None = None) -> None:
        """Say that a step has ended, with its loss if that is at hand, and wait for the next turn."""
        seconds, cpu = time.perf_counter() - self._began, time.process_time() - self._cpu
        self._write(json.dumps({"seconds": seconds, "cpu": cpu, "loss": loss}))
        if not self._in.readline():
            raise SystemExit("the benchmark has ended")
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """Say that there are no more steps; the process ends without waiting for anyone."""
        self._write(_END)

    def _write(self, text: str) -> None:
        self._out.write(f"{text}\n")
        self._out.flush()


@dataclass
class Timing:
    """What one contender took: seconds from its start to the end of its first step, and of each step after it.

    `cpu` are the processor seconds of its main process in each step, which depend less on what else runs.
    """

    start: float = 0.0
    steps: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)


def alternate(commands: Mapping[str, Sequence[str]], env: Mapping[str, str] | None = None) -> dict[str, Timing]:
    """Run every command as a process, one of whose steps runs at any time, until the last has no more of them.

    Args:
        commands: the contenders by name. Each takes its turns by a `Turn`, and all take as many steps.
        env: the environment, if not this process's.

    Raises:
        RuntimeError: a contender ended before its last step; the message is what it said.
    """
    found: dict[str, Timing] = {}
    running: dict[str, _Contender] = {}
    try:
        for name, command in commands.items():
            running[name] = _Contender(name, command, os.environ if env is None else env)
            found[name] = Timing()
            first = running[name].wait()
            if first is None:
                raise RuntimeError(f"{name} took no step")
            found[name].start = time.perf_counter() - running[name].began
            found[name].losses.append(first["loss"])
        going = list(running)
        while going:
            for name in list(going):
                step = running[name].turn()
                if step is None:
                    going.remove(name)
                else:
                    found[name].steps.append(step["seconds"])
                    found[name].cpu.append(step["cpu"])
                    found[name].losses.append(step["loss"])
    finally:
        for one in running.values():
            one.close()
    if len({len(one.steps) for one in found.values()}) > 1:
        raise RuntimeError(
            f"took different numbers of steps: { {name: len(one.steps) for name, one in found.items()} }"
        )
    return found


def ratios(found: Mapping[str, Timing], ours: str, num_warm_up: int) -> dict[str, dict[str, float]]:
    """How many times as fast as each other contender ours is, by medians of all steps and as the median of pairs."""
    steps = {name: one.steps[num_warm_up:] for name, one in found.items()}
    cpu = {name: median(one.cpu[num_warm_up:]) for name, one in found.items()}
    return {
        name: {
            "of_medians": round(median(theirs) / median(steps[ours]), 4),
            "median_of_pairs": round(median(b / a for a, b in zip(steps[ours], theirs, strict=True)), 4),
            "of_fastest": round(min(theirs) / min(steps[ours]), 4),
            "of_processor_time": round(cpu[name] / cpu[ours], 4),
        }
        for name, theirs in steps.items()
        if name != ours
    }


class _Contender:
    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="hp-turns-")
        self._listener = socket.socket(socket.AF_UNIX)
        path, said = (str(Path(self._folder.name) / one) for one in ("socket", "said"))
        self._listener.bind(path)
        self._listener.listen(1)
        self._said = open(said, "w+b")  # noqa: SIM115  # closed by `close`
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            command, env={**env, _SOCKET: path}, stdout=self._said, stderr=subprocess.STDOUT
        )
        self._socket = self._accept()
        self._in, self._out = self._socket.makefile("r"), self._socket.makefile("w")

    def _accept(self) -> socket.socket:
        self._listener.settimeout(1)
        while True:
            with suppress(TimeoutError):
                found, _ = self._listener.accept()
                found.settimeout(None)
                return found
            if self.process.poll() is not None:
                raise self._failed()

    def turn(self) -> dict[str, Any] | None:
        self._out.write("\n")
        self._out.flush()
        return self.wait()

    def wait(self) -> dict[str, Any] | None:
        line = self._in.readline().strip()
        if line == _END:
            return None
        if not line:
            self.process.wait()
            raise self._failed()
        step: dict[str, Any] = json.loads(line)
        return step

    def _failed(self) -> RuntimeError:
        self._said.seek(0)
        text = self._said.read().decode(errors="replace").strip()
        return RuntimeError(f"{self.name} ended with {self.process.returncode}: {text[-2000:]}")

    def close(self) -> None:
        for one in (self._in, self._out, self._socket, self._listener):
            with suppress(BrokenPipeError):
                one.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._said.close()
        self._folder.cleanup()


def hp_train(recipe: Path, *options: str, plugin: str = "turn_plugin.py") -> list[str]:
    """The command that trains a recipe with a plugin of this folder, by turns unless it is another one."""
    return [sys.executable, "-m", "hp_core", str(recipe), "-p", str(Path(__file__).with_name(plugin)), *options]
