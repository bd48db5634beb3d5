"""One value as it would be written after `key: ` in a recipe: what overrides and environment variables hold."""

from __future__ import annotations

from hp_core.config.node import MapNode, Node, ScalarNode
from hp_core.config.reader import read_yaml
from hp_core.errors import Origin

_KEY = "k: "


class ValueSyntaxError(ValueError):
    """The text is not one YAML value; the message says why and doesn't repeat the text."""


def read_value(text: str, origin: Origin) -> Node:
    """Read one YAML value; everything in it gets the same origin.

    Raises `ValueSyntaxError` for a text that YAML refuses there, and for one of which YAML would take only a part.
    """
    if text.lstrip().startswith(("|", ">")):
        raise ValueSyntaxError("block text doesn't fit here")
    if text.lstrip().startswith("&"):
        raise ValueSyntaxError("YAML would cut the text that begins with '&'")
    document = read_yaml(f"{_KEY}{text}", lambda line, column: origin)
    if document.problems:
        raise ValueSyntaxError(document.problems[0].message)
    root = document.root
    if not isinstance(root, MapNode) or list(root.entries) != ["k"]:
        raise ValueSyntaxError("it is more than one value")
    if f"{_KEY}{text}"[max(document.end, len(_KEY)) :].strip():
        raise ValueSyntaxError("YAML would cut the text at '#', which begins a comment")
    node = root.entries["k"].node
    if isinstance(node, ScalarNode) and node.problem is not None:
        raise ValueSyntaxError(node.problem.message)
    return node


def quote(text: str) -> str:
    """Return a text as a double-quoted YAML scalar on one line."""
    return '"' + "".join(_escape(character) for character in text) + '"'


_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def _escape(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
