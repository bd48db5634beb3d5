"""The pytest fixtures `hp_run` and `hp_ranks`, loaded by pytest wherever hyperparallel is installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

# Nothing heavier at the top: pytest imports this module in every test run, whatever it tests.
if TYPE_CHECKING:
    from hp_core.testing.runs import FinishedRun


class RunsRecipes(Protocol):
    """What the fixture `hp_run` is."""

    def __call__(self, recipe_text: str, *overrides: str, nproc: int = 1) -> FinishedRun:
        """Train a recipe and return what the run has left."""
        ...


@pytest.fixture
def hp_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunsRecipes:
    """`hp_run(recipe_text, *overrides, nproc=1)`: train a recipe in `tmp_path` and return its `FinishedRun`.

    One process trains right here; more are forked ranks. Files that the recipe names by a relative path (one-file
    plugins) go into `tmp_path`. What a user would read on the terminal is raised as `hp_core.InputError`.
    """
    if "HP_CACHE_DIR" not in os.environ:
        monkeypatch.setenv("HP_CACHE_DIR", str(tmp_path / "cache"))

    def run(recipe_text: str, *overrides: str, nproc: int = 1) -> FinishedRun:
        from hp_core.testing.runs import run_recipe

        return run_recipe(recipe_text, overrides, tmp_path, nproc=nproc)

    return run


@pytest.fixture
def hp_ranks() -> Callable[..., list[Any]]:
    """`hp_ranks(function, n, *args)`: call `function(environment, *args)` on n gloo ranks; what each returned.

    The function must be importable by name. `hp_core.testing.setups.tiny_setup(environment)` starts the process
    group.
    """

    def run(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        from hp_core.testing.ranks import run_ranks

        return run_ranks(function, world_size, *args)

    return run
