"""The located tree: a recipe's values, each with the place it was written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from hp_core.config.path import Path
from hp_core.errors import Origin, Problem

ScalarValue: TypeAlias = "bool | int | float | str | None"


@dataclass(frozen=True)
class ScalarNode:
    """One scalar.

    `text` is how it was written, without quotes; `plain` is false for quoted and block text. `expression` is what
    was written where the value came from the environment: such a value is never printed, its expression is.
    `problem`, without a path, says why the value couldn't be found out; it counts only if the node is still part
    of the recipe after bases and overrides.
    """

    value: ScalarValue
    origin: Origin
    text: str = ""
    plain: bool = True
    expression: str | None = None
    problem: Problem | None = None


@dataclass(frozen=True)
class ListNode:
    """A list. `expression` as for a scalar."""

    items: tuple[Node, ...]
    origin: Origin
    expression: str | None = None


@dataclass(frozen=True)
class Entry:
    """A key of a mapping: where it was written, and its value."""

    key_origin: Origin
    node: Node


@dataclass(frozen=True)
class MapNode:
    """A mapping. Keys are always text."""

    entries: Mapping[str, Entry] = field(default_factory=dict)
    origin: Origin = field(default_factory=Origin)

    def get(self, key: str) -> Node | None:
        """Return the value of a key, or None."""
        entry = self.entries.get(key)
        return None if entry is None else entry.node

    def with_entry(self, key: str, entry: Entry) -> MapNode:
        """Return a copy in which the key has this entry."""
        return replace(self, entries={**self.entries, key: entry})

    def with_node(self, key: str, node: Node, key_origin: Origin | None = None) -> MapNode:
        """Return a copy in which the key has this value; `key_origin` is that of the old key if there was one."""
        old = self.entries.get(key)
        return self.with_entry(key, Entry(old.key_origin if old else key_origin or node.origin, node))

    def without(self, *keys: str) -> MapNode:
        """Return a copy that lacks these keys."""
        return replace(self, entries={key: entry for key, entry in self.entries.items() if key not in keys})

    def only(self, *keys: str) -> MapNode:
        """Return a copy that has none but these keys."""
        return replace(self, entries={key: entry for key, entry in self.entries.items() if key in keys})


Node: TypeAlias = "ScalarNode | ListNode | MapNode"

NULL = ScalarNode(None, Origin(), "null")


def is_null(node: Node | None) -> bool:
    """Say whether the node is absent or a null that was written as one."""
    return node is None or (isinstance(node, ScalarNode) and node.value is None and node.problem is None)


def to_data(node: Node) -> Any:
    """Return the plain value: dicts, lists and scalars."""
    if isinstance(node, MapNode):
        return {key: to_data(entry.node) for key, entry in node.entries.items()}
    if isinstance(node, ListNode):
        return [to_data(item) for item in node.items]
    return node.value


def from_data(data: Any, origin: Origin | None = None) -> Node:
    """Return plain JSON-like data as a tree in which everything has the same origin (default: a default)."""
    origin = origin or Origin()
    if isinstance(data, Mapping):
        return MapNode({str(key): Entry(origin, from_data(value, origin)) for key, value in data.items()}, origin)
    if isinstance(data, (list, tuple)):
        return ListNode(tuple(from_data(item, origin) for item in data), origin)
    return ScalarNode(data, origin, str(data), plain=not isinstance(data, str))


def descend(node: Node, step: str | int) -> Node | None:
    """Return the value one step down, or None if there is none."""
    if isinstance(node, MapNode):
        return node.get(str(step))
    if isinstance(node, ListNode) and isinstance(step, int) and 0 <= step < len(node.items):
        return node.items[step]
    return None


def find(node: Node, path: Path) -> Node | None:
    """Return the value at a path, or None if there is none."""
    current: Node | None = node
    for step in path:
        if current is None:
            return None
        current = descend(current, step)
    return current


def nearest_origin(node: Node, path: Path, *, key: bool = False) -> Origin:
    """Return the origin of the value at a path, or of the innermost section around it that exists.

    With `key`, the origin of the last step's key rather than that of its value.
    """
    origin = node.origin
    current: Node | None = node
    for index, step in enumerate(path):
        parent = current
        current = descend(parent, step) if parent is not None else None
        if current is None:
            return origin
        origin = current.origin
        if key and index == len(path) - 1 and isinstance(parent, MapNode):
            return parent.entries[str(step)].key_origin
    return origin


def walk(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield every node with its path, parents first."""
    yield path, node
    if isinstance(node, MapNode):
        for key, entry in node.entries.items():
            yield from walk(entry.node, (*path, key))
    elif isinstance(node, ListNode):
        for index, item in enumerate(node.items):
            yield from walk(item, (*path, index))


def put(tree: MapNode, path: Path, value: Node) -> MapNode:
    """Return a copy of the tree with another value at a path that exists."""
    result = _put(tree, path, value)
    assert isinstance(result, MapNode)
    return result


def _put(node: Node, path: Path, value: Node) -> Node:
    if not path:
        return value
    step, rest = path[0], path[1:]
    below = descend(node, step)
    assert below is not None
    new = _put(below, rest, value)
    if isinstance(node, MapNode):
        return node.with_node(str(step), new)
    assert isinstance(node, ListNode)
    assert isinstance(step, int)
    return replace(node, items=(*node.items[:step], new, *node.items[step + 1 :]))


def describe(node: Node) -> str:
    """Return a value for an error message: what kind it is, and as it was written, in quotes.

    A value that came from the environment appears as its expression.
    """
    expression = None if isinstance(node, MapNode) else node.expression
    if expression is not None:
        return f"the value of '{expression}'"
    if isinstance(node, MapNode):
        return "a mapping"
    if isinstance(node, ListNode):
        return "a list"
    if node.value is None:
        return "null"
    kind = {bool: "the boolean", str: "the text"}.get(type(node.value), "the number")
    return f"{kind} '{_shorten(node.text)}'"


def _shorten(text: str, limit: int = 60) -> str:
    one_line = " ".join(text.splitlines())
    return one_line if len(one_line) <= limit else f"{one_line[: limit - 1]}…"
