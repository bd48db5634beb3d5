"""`hp-train plugins`: what is installed, from which package, and whether it works."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from hp_core.errors import EXIT_DONE, EXIT_USER_INPUT

if TYPE_CHECKING:
    from hp_core.plugin_status import Row


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `hp-train`."""
    parser = subparsers.add_parser(
        "plugins",
        help="list the installed components and plugins",
        description="List the installed components and plugins. Nothing is imported unless --load is given.",
    )
    parser.add_argument("--load", action="store_true", help="import each in a child process and say what is broken")
    parser.add_argument("--strict", action="store_true", help="exit with 2 if any can't be used")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--hooks", action="store_true", help="print the manual of the hooks instead")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the table, the JSON object or the manual and return the exit code."""
    if args.hooks:
        from hp_core.hooks import hook_manual

        print(hook_manual(), end="")
        return EXIT_DONE

    from hp_core.entry_points import scan
    from hp_core.plugin_status import status_rows

    found = scan()
    rows = status_rows(found.entries, load=args.load)
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "unreadable": found.unreadable}, indent=2))
    else:
        print(_table(rows))
        for text in found.unreadable:
            print(f"warning: {text}", file=sys.stderr)
    healthy = not found.unreadable and all(row.usable for row in rows)
    return EXIT_USER_INPUT if args.strict and not healthy else EXIT_DONE


def _table(rows: Sequence[Row]) -> str:
    if not rows:
        return "no installed package offers a component or plugin"
    cells = [("group", "name", "object", "package", "status")]
    cells += [(row.group, row.name, row.value, f"{row.distribution} {row.version}", _status(row)) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    return "\n".join("  ".join([*map(str.ljust, line[:4], widths), line[4]]) for line in cells)


def _status(row: Row) -> str:
    return f"{row.status}: {', '.join(row.hooks)}" if row.hooks else row.status
