"""A resolved recipe as YAML that loads again to the same configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from hp_core.components import group
from hp_core.config.loader import Recipe
from hp_core.config.node import ListNode, MapNode, Node, ScalarNode, ScalarValue, from_data
from hp_core.config.path import Path, format_path
from hp_core.config.resolved import resolved_tree
from hp_core.config.scalar import resolve_plain
from hp_core.config.signature import EMPTY, Signature
from hp_core.config.target import Target
from hp_core.config.value import quote

_INDENT = "  "
_LINE_LENGTH = 100
_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./+-]*(?: [A-Za-z0-9_./+-]+)*", re.ASCII)
# Text in YAML 1.2, but something else to programs that read YAML 1.1.
_WORDS_OF_YAML_1_1 = {"y", "n", "yes", "no", "on", "off"}


def resolved_yaml(recipe: Recipe, *, origins: bool = False) -> str:
    """Return the resolved recipe.

    What came from the environment appears as its expression. With `origins`, each value is followed by where it was
    written, and the arguments that a component section leaves out appear, with their defaults, as comments.
    """
    targets = {target.section: target for target in recipe.config.targets()}
    renderer = _Renderer(resolved_tree(recipe), targets if origins else None)
    return "\n".join(renderer.lines()) + "\n"


class _Renderer:
    def __init__(self, tree: MapNode, targets: dict[str, Target] | None) -> None:
        self.tree = tree
        self.targets = targets

    def lines(self) -> Iterator[str]:
        return self._map(self.tree, (), "")

    def _map(self, node: MapNode, path: Path, indent: str) -> Iterator[str]:
        for key, entry in node.entries.items():
            shown = scalar_text(key)
            yield from self._value(f"{indent}{shown}:", entry.node, (*path, key), indent)
        for name, default in self._defaults(path):
            text = "".join(_Renderer(MapNode().with_node(name, from_data(default)), None).lines())
            if "\n" not in text:
                yield f"{indent}# {text}  # default"

    def _value(self, head: str, node: Node, path: Path, indent: str) -> Iterator[str]:
        inline = inline_text(node)
        if inline is not None and (self.targets is None or _has_one_origin(node)):
            yield f"{head} {inline}{self._comment(node)}"
        elif isinstance(node, MapNode):
            yield head
            yield from self._map(node, path, indent + _INDENT)
        else:
            assert isinstance(node, ListNode)
            yield head
            for index, item in enumerate(node.items):
                yield from self._item(item, (*path, index), indent + _INDENT)

    def _item(self, node: Node, path: Path, indent: str) -> Iterator[str]:
        inline = inline_text(node)
        if inline is not None:
            yield f"{indent}- {inline}{self._comment(node)}"
            return
        below = self._map if isinstance(node, MapNode) else self._items
        for number, line in enumerate(below(node, path, indent + _INDENT)):  # type: ignore[arg-type]
            yield f"{indent}- {line.removeprefix(indent + _INDENT)}" if number == 0 else line

    def _items(self, node: ListNode, path: Path, indent: str) -> Iterator[str]:
        for index, item in enumerate(node.items):
            yield from self._item(item, (*path, index), indent)

    def _comment(self, node: Node) -> str:
        return "" if self.targets is None else f"  # {' '.join(str(node.origin).split())}"

    def _defaults(self, path: Path) -> Iterable[tuple[str, Any]]:
        """Yield the arguments that a component section leaves out and whose default a recipe could write."""
        target = (self.targets or {}).get(format_path(path))
        if target is None:
            return
        parameters = Signature.of(target.load()).recipe_parameters(group(target.group).runtime_arguments)
        for name, parameter in parameters.items():
            if name not in target.arguments and parameter.default is not EMPTY and _is_plain(parameter.default):
                yield name, parameter.default


def inline_text(node: Node) -> str | None:
    """Return a value as it fits on the line of its key; None if it doesn't."""
    if not isinstance(node, MapNode) and node.expression is not None:
        return quote(node.expression) if isinstance(node, ScalarNode) and not node.plain else node.expression
    if isinstance(node, ScalarNode):
        return scalar_text(node.value)
    if isinstance(node, MapNode):
        return None if node.entries else "{}"
    if not all(isinstance(item, ScalarNode) and item.expression is None for item in node.items):
        return None
    text = f"[{', '.join(scalar_text(item.value) for item in node.items if isinstance(item, ScalarNode))}]"
    return text if len(text) <= _LINE_LENGTH else None


def scalar_text(value: ScalarValue) -> str:
    """Return a scalar as YAML 1.2 that YAML 1.1 reads in the same way."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        digits, letter, exponent = repr(value).partition("e")
        return repr(value) if not letter or "." in digits else f"{digits}.0e{exponent}"
    if isinstance(value, int):
        return str(value)
    is_plain = _PLAIN.fullmatch(value) and isinstance(resolve_plain(value), str) and value.strip(".") != ""
    return value if is_plain and value.casefold() not in _WORDS_OF_YAML_1_1 else quote(value)


def _has_one_origin(node: Node) -> bool:
    return not isinstance(node, ListNode) or len({(item.origin.file, item.origin.option) for item in node.items}) <= 1


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, (bool, int, float, str))
