"""`hp-train data`: what a recipe would train on, without its model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from hp_core.cli.checked import checked_recipe
from hp_core.errors import InputError

if TYPE_CHECKING:
    from hp_core.config import Recipe
    from hp_core.data.protocols import Datasets


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `hp-train`."""
    parser = subparsers.add_parser(
        "data",
        help="show what a recipe trains on",
        description="Build the recipe's data as a run would, without its model or a device, and show it: rows with "
        "their targets marked, the lengths of documents, how full rows are, what was left out or cut, the tokens of "
        "each source, and documents that are there twice. Dotted overrides (--dataset.max_seq_len=512) act.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", help="the recipe file")
    parser.add_argument(
        "-p", "--plugin", action="append", default=[], metavar="NAME", help="a plugin to activate besides the recipe's"
    )
    parser.add_argument("--rows", type=_count, default=3, metavar="N", help="rows to show (default 3)")
    parser.add_argument("--split", choices=("train", "validation", "test"), default="train", help="rows of which split")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(func=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    """Build the data and show it; raises `InputError` with what is wrong with it."""
    from hp_core.data.survey import survey
    from hp_core.observe.data_text import say_survey

    recipe = checked_recipe(args.recipe, args.overrides, args.plugin)
    try:
        datasets = _build(recipe, args.plugin)
        found = survey(datasets, split=args.split, seed=recipe.config.training.seed, num_rows=args.rows)
    except InputError as error:
        raise recipe.located(error) from error
    if args.json:
        print(json.dumps(found.as_dict(), ensure_ascii=False))
    else:
        say_survey(found, args.split)
    return 0


def _build(recipe: Recipe, extra_plugins: list[str]) -> Datasets:
    from hp_core.data.protocols import MeshContext
    from hp_core.data.rows import as_datasets
    from hp_core.plugins import load_plugins
    from hp_core.training.defaults import DefaultHooks

    config = recipe.config
    plugins = load_plugins(
        [*config.plugins, *extra_plugins], base_dir=Path(recipe.path).resolve().parent, defaults=(DefaultHooks(),)
    )
    tokenizer = config.dataset.tokenizer
    built = plugins.hook.build_dataset(
        config=config,
        transform=None,
        tokenizer=None if tokenizer is None else tokenizer.build(),
        mesh_context=MeshContext(),
        training_config=config.training,
    )
    return as_datasets(built)


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return value
