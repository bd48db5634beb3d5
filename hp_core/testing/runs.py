"""Whole runs of a recipe's text, in this process or on several ranks."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hp_core.checkpoint.layout import MANIFEST
from hp_core.cli.checked import checked_recipe
from hp_core.config import Recipe, load_recipe
from hp_core.errors import HpError, InputError, Problem, RunError
from hp_core.observe.trackers import read_metrics
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.testing.ranks import PRELOAD, RankError, run_ranks
from hp_core.training.run import Report
from hp_core.training.session import train
from hp_core.training.state import random_state, restore_random_state


@dataclass(frozen=True)
class FinishedRun:
    """What a run has left.

    `rows` are those of `metrics.jsonl`, evaluations among them; `report` is what training returned.
    """

    directory: Path
    rows: tuple[Mapping[str, Any], ...]
    manifest: Mapping[str, Any]
    report: Report

    @property
    def losses(self) -> list[float | None]:
        """The training loss of each logged step, None where nothing was learnt."""
        return [row["loss"] for row in self.rows if "loss" in row]


def run_recipe(
    text: str,
    overrides: Sequence[str],
    folder: Path,
    *,
    nproc: int = 1,
    plugins: Sequence[str] = (),
    is_apart: bool = False,
) -> FinishedRun:
    """Write a recipe into `folder` and train it there.

    Args:
        text: the recipe.
        overrides: recipe values as on the command line, `training.seed=1`; leading dashes may be left out.
        folder: where the recipe and, unless an override names another `output_dir`, the run are written.
        nproc: ranks; one trains in this process.
        plugins: plugins to activate besides the recipe's.
        is_apart: train in a new process even where there is one rank.

    Raises:
        InputError: the recipe, the plugins or what they build are refused.
        RunError: the run failed; on several ranks, the first that did.
        RankError: a rank failed with an error that isn't for users.
    """
    path = _new_path(folder, "recipe.yaml")
    path.write_text(text, encoding="utf-8")
    options = [f"--{override.lstrip('-')}" for override in overrides]
    if not any(option.startswith("--output_dir=") for option in options):
        options.append(f"--output_dir={_new_path(folder, 'run')}")
    recipe = checked_recipe(str(path), options, plugins, nproc)
    if nproc == 1 and not is_apart:
        with undisturbed():
            report = train(recipe, environment=ProcessEnvironment(), extra_plugins=plugins)
    else:
        report = _on_ranks(recipe, options, nproc, plugins)
    directory = Path(recipe.config.output_dir or "")
    manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    return FinishedRun(directory, tuple(read_metrics(directory)), manifest, report)


def _new_path(folder: Path, name: str) -> Path:
    path, number = folder / name, 1
    while path.exists():
        number += 1
        path = folder / f"{Path(name).stem}-{number}{Path(name).suffix}"
    return path


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leave random streams, threads, determinism and the import path of this process as they were."""
    random, path, threads = random_state(), list(sys.path), torch.get_num_threads()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        restore_random_state(random)
        sys.path[:] = path
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(is_deterministic)


# Several ranks.


@dataclass(frozen=True)
class _Ended:
    report: Report | None = None
    problems: tuple[Problem, ...] = ()
    error: str | None = None
    is_for_users: bool = False
    when: float = 0.0


def _on_ranks(recipe: Recipe, options: Sequence[str], nproc: int, plugins: Sequence[str]) -> Report:
    preload = (*PRELOAD, *sorted(_modules_of(recipe)))
    cache = os.environ.get("HP_CACHE_DIR")
    ranks = run_ranks(_train_rank, nproc, str(recipe.path), list(options), tuple(plugins), cache, preload=preload)
    # A mistake of the user's is everyone's; a broken connection only ever follows from something else.
    failures = sorted(
        (one for one in ranks if one.report is None), key=lambda one: (not one.problems, not one.is_for_users, one.when)
    )
    if not failures:
        report: Report = ranks[0].report
        return report
    first: _Ended = failures[0]
    if first.problems:
        raise InputError(first.problems)
    raise (RunError if first.is_for_users else RankError)(first.error or "")


def _modules_of(recipe: Recipe) -> Iterator[str]:
    """The modules that the recipe's components are in, which one process can import for all ranks."""
    for target in recipe.config.targets():
        module = getattr(target.load(), "__module__", None)
        if isinstance(module, str):
            yield module


def _train_rank(
    environment: ProcessEnvironment, path: str, options: list[str], plugins: tuple[str, ...], cache: str | None
) -> _Ended:
    if cache is not None:
        os.environ["HP_CACHE_DIR"] = cache  # the server that ranks are forked from may be older than it
    importlib.invalidate_caches()  # and modules may have been written since
    if environment.world_size == 1:
        # One process is no group of ranks, here as elsewhere.
        environment = ProcessEnvironment()
    try:
        return _Ended(train(load_recipe(path, options), environment=environment, extra_plugins=plugins))
    except InputError as error:
        return _Ended(None, error.problems, str(error), True, time.time())
    except HpError as error:
        return _Ended(None, (), str(error), True, time.time())
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return _Ended(None, (), f"rank {environment.rank}: {text}", False, time.time())
