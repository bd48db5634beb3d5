"""Dotted overrides: `--training.train_iters=10`, `--trackers[0].name=x`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hp_core.config.environment import resolve_environment
from hp_core.config.node import Entry, ListNode, MapNode, Node, ScalarNode, find, is_null, put, to_data
from hp_core.config.path import Path, format_path, split_path
from hp_core.config.section import IMPORT_PATH, NAME, ComponentSection, names_another, section_at, spell_out
from hp_core.config.value import ValueSyntaxError, quote, read_value
from hp_core.errors import Origin, Problem


@dataclass(frozen=True)
class Override:
    """A value from the command line and the path it goes to."""

    path: Path
    node: Node
    origin: Origin


def parse_overrides(texts: Iterable[str], variables: Mapping[str, str]) -> tuple[list[Override], list[Problem]]:
    """Read overrides as typed, in any order; returns them parents first, with what is wrong with them.

    The value is what the same text means after `key: ` in a recipe.
    """
    overrides: dict[Path, Override] = {}
    problems: list[Problem] = []
    for text in texts:
        origin = Origin(option=text)
        try:
            path, rest = split_path(text.removeprefix("--"))
        except ValueError:
            path, rest = (), ""
        if not rest.startswith("="):
            problems.append(Problem("is not an override", origin=origin, hint="write --section.key=value"))
            continue
        override = _normalised(path, resolve_environment(_read(path, rest[1:], origin), variables), origin)
        first = overrides.setdefault(override.path, override)
        if not _same(first.node, override.node):
            message = f"given twice, first as {first.origin}"
            problems.append(Problem(message, format_path(path), origin, hint="leave one of them out"))
    return sorted(overrides.values(), key=_order), problems


def _order(override: Override) -> tuple[int, bool, str]:
    """Parents first, and a component's name before its arguments, which another name would drop."""
    return len(override.path), not _names_component(override.path), format_path(override.path)


def _names_component(path: Path) -> bool:
    return path[-1] in (NAME, IMPORT_PATH) and section_at(path[:-1]) is not None


def apply_overrides(tree: MapNode, overrides: Iterable[Override]) -> tuple[MapNode, list[Problem]]:
    """Return the tree with the overrides, which must come parents first, and what is wrong with them.

    A value replaces what was at its path. One that names another component drops the old one's arguments.
    """
    problems: list[Problem] = []
    for override in overrides:
        section = section_at(override.path[:-1])
        if section is not None and _names_component(override.path):
            tree = _drop_arguments(tree, override, section)
        try:
            changed = _assign(tree, override.path, override)
        except _MisfitError as error:
            problems.append(replace(error.problem, origin=override.origin))
        else:
            assert isinstance(changed, MapNode)
            tree = changed
    return tree, problems


def _read(path: Path, text: str, origin: Origin) -> Node:
    try:
        return read_value(text, origin)
    except ValueSyntaxError as error:
        hint = f"write --{format_path(path)}={shlex.quote(quote(text))} to give this text"
        return ScalarNode(None, origin, text, problem=Problem(str(error), hint=hint))


def _normalised(path: Path, node: Node, origin: Origin) -> Override:
    """A bare name for a component is its `name`, so that both spellings mean the same."""
    if section_at(path) is not None and isinstance(node, ScalarNode) and isinstance(node.value, str):
        return Override((*path, NAME), node, origin)
    return Override(path, spell_out(node, path), origin)


def _same(one: Node, other: Node) -> bool:
    left, right = to_data(one), to_data(other)
    return repr(left) == repr(right)


def _drop_arguments(tree: MapNode, override: Override, section: ComponentSection) -> MapNode:
    path = override.path[:-1]
    old = find(tree, path)
    if not isinstance(old, MapNode):
        return tree
    key = str(override.path[-1])
    new = MapNode().with_node(key, override.node)
    if names_another(section, old, new):
        # A `name` and a `_target_` that are both given on the command line must both arrive, to be refused.
        both = [other for other in (NAME, IMPORT_PATH) if _is_from_option(old.get(other))]
        return put(tree, path, old.only(*section.settings, *both))
    return tree


def _is_from_option(node: Node | None) -> bool:
    return node is not None and node.origin.option is not None


class _MisfitError(Exception):
    def __init__(self, path: Path, message: str, hint: str = "") -> None:
        self.problem = Problem(message, format_path(path), hint=hint)
        super().__init__(message)


def _assign(node: Node | None, path: Path, override: Override, done: Path = ()) -> Node:
    """Return the node with the override's value at a path below it; sections on the way appear as needed."""
    if not path:
        return override.node
    step, rest = path[0], path[1:]
    if isinstance(step, int):
        items = _items(node, step, done)
        items[step] = _assign(items[step], rest, override, (*done, step))
        return ListNode(tuple(items), node.origin if node is not None else override.origin)
    parent = MapNode({}, override.origin) if node is None or is_null(node) else node
    if isinstance(parent, ListNode):
        raise _MisfitError((*done, step), f"{format_path(done)} is a list", f"write {format_path((*done, 0))}.{step}")
    if not isinstance(parent, MapNode):
        raise _MisfitError((*done, step), f"{format_path(done)} is a value, not a section")
    old = parent.entries.get(step)
    below = _assign(old.node if old else None, rest, override, (*done, step))
    return parent.with_entry(step, Entry(old.key_origin if old and rest else override.origin, below))


def _items(node: Node | None, index: int, done: Path) -> list[Node]:
    if not isinstance(node, ListNode) and not is_null(node):
        raise _MisfitError((*done, index), f"{format_path(done)} is not a list")
    items = list(node.items) if isinstance(node, ListNode) else []
    if index >= len(items):
        count = "1 item" if len(items) == 1 else f"{len(items)} items"
        raise _MisfitError((*done, index), f"{format_path(done)} has {count}; the first is [0]")
    return items
