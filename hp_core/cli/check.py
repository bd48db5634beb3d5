"""`hp-train check`: everything that can be found wrong with a recipe without running it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hp_core.cli import processes
from hp_core.cli.checked import checked_recipe
from hp_core.cli.checked_loss import checked_loss
from hp_core.errors import InputError

if TYPE_CHECKING:
    from hp_core.config import Recipe, TrainerConfig


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `hp-train`."""
    parser = subparsers.add_parser(
        "check",
        help="check a recipe",
        description="Report every error of a recipe, each with file, line and column, and try its loss on a tiny "
        "model. Dotted overrides (--training.seed=1) are checked with it. Exit code 0 if there is none, 2 otherwise.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", help="the recipe file")
    parser.add_argument(
        "-p", "--plugin", action="append", default=[], metavar="NAME", help="a plugin to activate besides the recipe's"
    )
    processes.add_options(parser)
    parser.set_defaults(func=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    """Check the recipe, load its plugins and try its loss; raises `InputError` with every problem."""
    recipe = checked_recipe(args.recipe, processes.overrides(args), args.plugin, with_class=True)
    remarks = [*checked_loss(recipe, args.plugin), *_export_remarks(recipe)]
    print(f"{args.recipe}: ok")
    print(summary(recipe.config))
    for remark in remarks:
        print(remark)
    return 0


def _export_remarks(recipe: Recipe) -> list[str]:
    from hp_core.export.static import export_remarks

    try:
        return export_remarks(recipe.config)
    except InputError as error:
        raise recipe.located(error) from error


def summary(config: TrainerConfig) -> str:
    """Return a recipe in one line: what is trained on what, and for how long."""
    training = config.training
    lengths = {"steps": training.train_iters, "samples": training.train_samples, "epochs": training.train_epochs}
    length = next(f"{value} {unit}" for unit, value in lengths.items() if value is not None)
    loss = config.loss_fn.spelling if config.loss_fn is not None else "the model's own"
    parts = (
        f"model {config.model.spelling}",
        f"dataset {config.dataset.source.spelling}",
        f"loss {loss}",
        f"optimizer {config.optimizer.spelling}",
        f"{length} of {training.global_batch_size} rows" if training.train_iters else length,
    )
    return ", ".join(parts)
