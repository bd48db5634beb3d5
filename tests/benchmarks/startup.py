"""Milliseconds from starting `hp-train` to its end for commands that train nothing, and what they import on the way.

Whole processes, as the shell sees them, by turns so that a busy machine hits all alike. Compiled modules are cached
by a first run, as pip leaves them. `user_ms` counts the processor's time alone and depends less on what else runs.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NUM_RUNS = 15
HEAVY = ("torch", "transformers", "datasets", "numpy", "pydantic")
FORBIDDEN = ("torch", "transformers")

PYTHON = (sys.executable, "-c", "pass")
COMMANDS: Mapping[str, Sequence[str]] = {
    "python": PYTHON,
    "help": ("hp-train", "--help"),
    "module_help": (sys.executable, "-m", "hp_core", "--help"),
    "plugins": ("hp-train", "plugins"),
    "check": ("hp-train", "check", "examples/quickstart/recipe.yaml"),
}
GOALS_MS = {"help": 150, "module_help": 150, "plugins": 300}


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hp-startup-") as folder:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        env |= {"PYTHONPYCACHEPREFIX": folder, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"}
        for command in COMMANDS.values():
            _run(command, env)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
        for turn in range(NUM_RUNS):
            for name, command in COMMANDS.items():
                if name != "check" or turn < 3:  # it imports torch and the components, to read their signatures
                    times[name].append(_run(command, env))
        imported = {name: _imports(command, env) for name, command in COMMANDS.items() if name in GOALS_MS}
    medians = {name: round(1000 * median(wall for wall, _ in runs), 1) for name, runs in times.items()}
    wrong = {name: found for name, found in imported.items() if set(found) & set(FORBIDDEN)}
    if wrong:
        raise SystemExit(f"commands that must start without {' and '.join(FORBIDDEN)} import them: {wrong}")
    return {
        "wall_ms": medians,
        "user_ms": {name: round(1000 * median(user for _, user in runs), 1) for name, runs in times.items()},
        "fastest_ms": {name: round(1000 * min(wall for wall, _ in runs), 1) for name, runs in times.items()},
        "goals_ms": GOALS_MS,
        "reached": all(medians[name] <= goal for name, goal in GOALS_MS.items()),
        "heavy_imports": imported,
    }


def _run(command: Sequence[str], env: Mapping[str, str]) -> tuple[float, float]:
    """The seconds one process took: on the clock, and of the processor in user mode."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    started = time.perf_counter()
    subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, check=True)
    seconds = time.perf_counter() - started
    return seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def _imports(command: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Which of the heavy packages a command imports."""
    arguments = command[1:] if command[0] == sys.executable else ("-m", "hp_core", *command[1:])
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    modules = set(re.findall(r"^import time:.*\|\s+([\w.]+)$", done.stderr, flags=re.MULTILINE))
    if "hp_core.cli.main" not in modules:
        raise SystemExit("can't read what -X importtime says")
    return sorted(modules & set(HEAVY))
