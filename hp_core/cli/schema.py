"""`hp-train schema`: a JSON Schema of recipes, with which editors complete and check them."""

from __future__ import annotations

import argparse


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `hp-train`."""
    parser = subparsers.add_parser(
        "schema",
        help="print a JSON Schema of recipes",
        description="Print a JSON Schema (draft 2020-12) of recipes that includes the installed components. "
        "A component that can't be imported is listed by name.",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the schema."""
    import json

    from hp_core.components import Components
    from hp_core.config.json_schema import recipe_schema

    print(json.dumps(recipe_schema(Components.discover()), indent=2, ensure_ascii=False))
    return 0
