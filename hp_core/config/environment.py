"""`${env:NAME}` and `${env:NAME,default}`: recipe values that come from the environment."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hp_core.config.node import ListNode, MapNode, Node, ScalarNode
from hp_core.config.value import ValueSyntaxError, read_value
from hp_core.errors import Problem

_START = "${env:"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class _ExpressionError(ValueError):
    def __init__(self, message: str, hint: str) -> None:
        self.problem = Problem(message, hint=hint)
        super().__init__(message)


@dataclass(frozen=True)
class _Expression:
    """One `${env:…}`: where it is in its text, the variable, and the default as it was written."""

    start: int
    end: int
    name: str
    default: str | None


def resolve_environment(node: Node, variables: Mapping[str, str]) -> Node:
    """Return the tree with every expression in a scalar replaced by what it stands for.

    A scalar that is one expression gets the value that the variable's text has in YAML: a number, a boolean, null,
    text or a list of these. A quoted or `!!str` scalar, and one with more than the expression in it, stays text.
    What can't be resolved becomes a node with a problem.
    """
    if isinstance(node, MapNode):
        entries = {
            key: replace(entry, node=resolve_environment(entry.node, variables)) for key, entry in node.entries.items()
        }
        return replace(node, entries=entries)
    if isinstance(node, ListNode):
        return replace(node, items=tuple(resolve_environment(item, variables) for item in node.items))
    if node.expression is not None or not isinstance(node.value, str) or _START not in node.value:
        return node
    return _resolve(node, variables)


def without_quotes(node: ScalarNode, variables: Mapping[str, str]) -> Node | None:
    """Return what a quoted expression stands for without its quotes; None if the scalar is no quoted expression.

    Inside `[ ]` and `{ }` YAML demands the quotes, so they don't say that the value is text.
    """
    if node.plain or node.expression is None or node.problem is not None:
        return None
    resolved = _resolve(replace(node, value=node.expression, plain=True), variables)
    if isinstance(resolved, ScalarNode):
        return None if resolved.problem or isinstance(resolved.value, str) else replace(resolved, plain=False)
    return resolved


def _resolve(node: ScalarNode, variables: Mapping[str, str]) -> Node:
    text = str(node.value)
    try:
        expressions = list(_expressions(text))
        if node.plain and len(expressions) == 1 and expressions[0].end - expressions[0].start == len(text):
            return _typed(node, text, variables, expressions[0])
        return replace(node, value=_fill(text, expressions, variables), text=text, expression=text)
    except _ExpressionError as error:
        return replace(node, value=None, text=text, problem=error.problem, expression=text)


def _typed(node: ScalarNode, text: str, variables: Mapping[str, str], expression: _Expression) -> Node:
    try:
        value = read_value(_value(expression, variables), node.origin)
    except ValueSyntaxError:
        message = f"the value of '{text}' is not one YAML value"
        raise _ExpressionError(message, "put the expression in quotes to take it as text") from None
    if isinstance(value, ScalarNode):
        return replace(value, text=text, expression=text)
    if isinstance(value, ListNode) and all(isinstance(item, ScalarNode) for item in value.items):
        items = tuple(replace(item, text=text, expression=text) for item in value.items if isinstance(item, ScalarNode))
        return ListNode(items, node.origin, text)
    message = f"the value of '{text}' is a mapping or holds one"
    raise _ExpressionError(message, "a variable gives a scalar or a list of scalars")


def _fill(text: str, expressions: list[_Expression], variables: Mapping[str, str]) -> str:
    filled = ""
    position = 0
    for expression in expressions:
        filled += text[position : expression.start] + _value(expression, variables)
        position = expression.end
    return filled + text[position:]


def _value(expression: _Expression, variables: Mapping[str, str]) -> str:
    value = variables.get(expression.name)
    if value is not None:
        return value
    if expression.default is None:
        hint = f"set it, or write ${{env:{expression.name},default}}"
        raise _ExpressionError(f"the environment variable {expression.name!r} is not set", hint)
    return _fill(expression.default, list(_expressions(expression.default)), variables)


def _expressions(text: str) -> Iterator[_Expression]:
    position = 0
    while (start := text.find(_START, position)) >= 0:
        position = _closing_brace(text, start + len(_START)) + 1
        name, comma, default = text[start + len(_START) : position - 1].partition(",")
        if not _NAME.fullmatch(name.strip()):
            hint = "write ${env:NAME} or ${env:NAME,default}"
            raise _ExpressionError(f"{name.strip()!r} can't be the name of an environment variable", hint)
        yield _Expression(start, position, name.strip(), default.strip() if comma else None)


def _closing_brace(text: str, position: int) -> int:
    depth = 1
    for index in range(position, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise _ExpressionError(f"'{_START}' has no closing brace", "write ${env:NAME} or ${env:NAME,default}")
