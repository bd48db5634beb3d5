"""Two resolved recipes, value by value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hp_core.config.loader import Recipe
from hp_core.config.models import TrainerConfig
from hp_core.config.node import MapNode, Node, ScalarNode, to_data
from hp_core.config.path import Path, format_path
from hp_core.config.render import inline_text
from hp_core.config.resolved import resolved_tree


def differences(left: Recipe, right: Recipe) -> list[str]:
    """Return one line for each value that differs, in the order of the recipes.

    Values from the environment are compared, but appear as their expressions.
    """
    before, after = dict(_values(resolved_tree(left))), dict(_values(resolved_tree(right)))
    lines: list[str] = []
    roots = list(TrainerConfig.model_fields)
    for path in sorted(dict.fromkeys((*before, *after)), key=lambda path: roots.index(str(path[0]))):
        old, new = before.get(path), after.get(path)
        if _is_longer(path, before if old is None else after if new is None else {}):
            continue  # an empty list or mapping on one side; the other side's values have their own lines
        if old is None or new is None or _differ(old, new):
            lines.append(f"{format_path(path)}: {_shown(old)} -> {_shown(new)}")
    return lines


def _values(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield what fits on a line: scalars, lists of scalars, and empty mappings."""
    if path and inline_text(node) is not None:
        yield path, node
    elif isinstance(node, MapNode):
        for key, entry in node.entries.items():
            yield from _values(entry.node, (*path, key))
    elif not isinstance(node, ScalarNode):
        for index, item in enumerate(node.items):
            yield from _values(item, (*path, index))


def _is_longer(path: Path, paths: Iterable[Path]) -> bool:
    return any(other[: len(path)] == path for other in paths)


def _differ(old: Node, new: Node) -> bool:
    # 1 and 1.0 differ in a section whose component takes anything.
    return repr(to_data(old)) != repr(to_data(new))


def _shown(node: Node | None) -> str:
    return "absent" if node is None else f"{inline_text(node)} ({node.origin})"
