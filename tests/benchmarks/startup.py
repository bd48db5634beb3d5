"""Milliseconds from starting `hp-train` to the end of commands that train nothing, and to a run's first step.

Whole processes, as the shell sees them, by turns so that a busy machine hits all alike. Compiled modules are cached
by a first run, as pip leaves them. `user_ms` counts the processor's time alone and depends less on what else runs.
The time to the end of the first step is that over the time of transformers' Trainer, on the tiny Qwen3 of `peers`.
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
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.contenders import command, missing
from tests.benchmarks.peers import tiny_spec, write_recipe
from tests.benchmarks.turns import alternate, hp_train

ROOT = Path(__file__).resolve().parents[2]
NUM_RUNS = 15
NUM_FIRST_STEPS = 7
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
FIRST_STEP_GOAL = 1.0
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
        first = _first_steps(Path(folder), env)
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
        **first,
    }


def _first_steps(folder: Path, env: Mapping[str, str]) -> dict[str, Any]:
    """How long a run takes from its start to the end of its first step, ours over the Trainer's."""
    if (lacking := missing("transformers_trainer")) is not None:
        return {"first_step": {"skipped": lacking}}
    spec = replace(tiny_spec(folder, 4), num_steps=1, warm_up=0)
    commands = {
        "hyperparallel": hp_train(write_recipe(folder, spec), f"--output_dir={folder / 'run'}", "--overwrite"),
        "transformers_trainer": command("transformers_trainer", spec.write(folder / "spec.json")),
    }
    starts: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(NUM_FIRST_STEPS + 1):
        for name, one in commands.items():
            start = alternate({name: one}, {**env, "HP_CACHE_DIR": str(folder / "cache")})[name].start
            if turn:  # the first compiles the modules
                starts[name].append(start)
    ours, theirs = (median(starts[name]) for name in commands)
    ratio = median(a / b for a, b in zip(*starts.values(), strict=True))
    return {
        "first_step": {
            "ratio": round(ratio, 3),
            "ms": {"hyperparallel": round(1000 * ours), "transformers_trainer": round(1000 * theirs)},
            "goal": FIRST_STEP_GOAL,
            "reached": ratio <= FIRST_STEP_GOAL,
        }
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
