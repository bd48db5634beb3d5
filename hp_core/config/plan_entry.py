"""What an entry of `plan_overrides` must be beyond the types of its keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hp_core.config.importing import import_module_type
from hp_core.config.node import ListNode, MapNode, ScalarNode
from hp_core.config.path import ITEM, Path, format_path
from hp_core.config.section import places
from hp_core.errors import InputError, Problem


def entry_problems(tree: MapNode) -> Iterator[Problem]:
    """Yield a problem for each pattern that an entry repeats, and each module type that is none. Imports the types."""
    for path, entry in places(tree, ("plan_overrides", ITEM)):
        if isinstance(entry, MapNode):
            yield from _repeated_patterns(entry, path)
            yield from _wrong_module_type(entry, path)


def _repeated_patterns(entry: MapNode, path: Path) -> Iterator[Problem]:
    patterns = entry.get("match")
    first: dict[str, int] = {}
    for index, item in enumerate(patterns.items if isinstance(patterns, ListNode) else ()):
        if isinstance(item, ScalarNode) and isinstance(item.value, str) and first.setdefault(item.value, index) < index:
            repeated = f"repeats {format_path(('match', first[item.value]))}, {(item.expression or item.value)!r}"
            yield Problem(repeated, format_path((*path, "match", index)), item.origin, "remove one of them")


def _wrong_module_type(entry: MapNode, path: Path) -> Iterator[Problem]:
    node = entry.get("module_type")
    if not isinstance(node, ScalarNode) or not isinstance(node.value, str):
        return
    try:
        import_module_type(node.value)
    except InputError as error:
        problem = error.problems[0]
        if node.expression is not None:  # the details show the value, which came from the environment
            problem = Problem(f"the value of {node.expression!r} names no torch.nn.Module that can be imported")
        elif node.value.casefold() == "none":
            problem = replace(problem, hint="nothing is written null")
        yield replace(problem, path=format_path((*path, "module_type")), origin=node.origin)
