"""`hp-train config`: the resolved recipe, with where each value comes from."""

from __future__ import annotations

import argparse


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `hp-train`."""
    parser = subparsers.add_parser(
        "config",
        help="print a recipe with everything resolved",
        description="Print the recipe with bases merged, overrides applied and defaults filled in, each value with "
        "its origin. Values from the environment appear as their ${env:...} expressions.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", help="the recipe file")
    parser.add_argument("--diff", metavar="OTHER", help="print what differs from another recipe instead")
    parser.add_argument("--json", action="store_true", help="print JSON, without origins")
    parser.set_defaults(func=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    """Print the resolved recipe, or its differences from another one; overrides apply to the first only."""
    import json

    from hp_core.config import load_recipe
    from hp_core.config.diff import differences
    from hp_core.config.render import resolved_yaml
    from hp_core.config.resolved import resolved_tree, to_shown_data

    recipe = load_recipe(args.recipe, args.overrides)
    if args.diff is not None:
        lines = differences(recipe, load_recipe(args.diff))
        print(json.dumps(lines, indent=2, ensure_ascii=False) if args.json else "\n".join(lines) or "no differences")
    elif args.json:
        print(json.dumps(to_shown_data(resolved_tree(recipe)), indent=2, ensure_ascii=False))
    else:
        print(resolved_yaml(recipe, origins=True), end="")
    return 0
