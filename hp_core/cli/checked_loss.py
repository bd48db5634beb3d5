"""A recipe's loss, tried on a tiny model: what `check` does, and a run does on its own model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hp_core.errors import InputError

if TYPE_CHECKING:
    from hp_core.config import Recipe


def checked_loss(recipe: Recipe, extra_plugins: Sequence[str] = ()) -> list[str]:
    """Try the loss of a recipe that has no other faults; return what may be wrong with it, a line each.

    Args:
        recipe: the recipe.
        extra_plugins: plugins named on the command line besides the recipe's.

    Raises `InputError` with every fault of the loss, at its place in the recipe.
    """
    from hp_core.plugins import load_plugins
    from hp_core.training.defaults import DefaultHooks
    from hp_core.training.stand_in import try_loss

    config = recipe.config
    try:
        plugins = load_plugins(
            [*config.plugins, *extra_plugins],
            base_dir=Path(recipe.path).resolve().parent,
            defaults=(DefaultHooks(),),
        )
        trial = try_loss(config, plugins)
        if trial.diagnosis.errors:
            raise InputError(trial.diagnosis.errors)
    except InputError as error:
        raise recipe.located(error) from error
    if trial.not_tried is not None:
        return [f"loss_fn: not tried: {trial.not_tried}"]
    return [str(warning) for warning in trial.diagnosis.warnings]
