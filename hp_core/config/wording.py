"""What pydantic finds wrong, in the words and with the positions of the recipe."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from hp_core.config.base import CONFLICT
from hp_core.config.node import MapNode, Node, ScalarNode, descend, describe, find, nearest_origin
from hp_core.config.path import Path, format_path
from hp_core.config.scalar import resolve_plain
from hp_core.config.shape import known_keys
from hp_core.config.value import quote
from hp_core.errors import Problem
from hp_core.spelling import did_you_mean, nearest

# pydantic's error types for a value of the wrong kind, and the kind they want.
_EXPECTED = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "frozen_set_type": "a list",
    "iterable_type": "a list",
    "text_or_list_type": "text or a list of text",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dataclass_type": "a mapping",
    "dataclass_exact_type": "a mapping",
    "none_required": "null",
}
# Those for a value of the right kind that is out of bounds; the text is filled from pydantic's context.
_BOUNDS = {
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "finite_number": "must be a finite number",
    "string_pattern_mismatch": "must match the pattern '{pattern}'",
}
_OBJECT_TYPES = {"needs_python_object", "is_instance_of", "is_subclass_of", "is_type", "callable_type"}
_UNKNOWN_TYPES = {"extra_forbidden", "unexpected_keyword_argument"}
_MISSING_TYPES = {"missing", "missing_argument", "missing_keyword_only_argument"}
_NULL_WORDS = {"none", "nil", "nan"}
_FALSE_WORDS = {"no", "off", "n"}
_TRUE_WORDS = {"yes", "on", "y"}


@dataclass(frozen=True)
class _Finding:
    """One pydantic error: the path of its value, and where a union's alternatives begin to differ, with which."""

    kind: str
    path: Path
    last: str | int | None
    context: Mapping[str, Any]
    message: str
    union: Path | None
    alternative: str

    @property
    def is_kind(self) -> bool:
        """Whether the value is of a kind that was not wanted."""
        return self.kind in _EXPECTED or self.kind in ("literal_error", "enum")


def problems_of(
    error: ValidationError, node: Node, path: Path, annotation: Any, elsewhere: Mapping[str, str] | None = None
) -> list[Problem]:
    """Return a validation error's findings as problems.

    `node` is what was validated, `path` its recipe path, and `annotation` what it was validated against (a mapping
    of annotations for a mapping of arguments). `elsewhere` has the paths of keys that may be in a wrong place.
    Conflicts are left out: pydantic looks for them only where it finds nothing else.
    """
    found = error.errors(include_url=False, include_input=False)
    findings = [_finding(details, node) for details in found if details["type"] != CONFLICT]
    problems: list[Problem] = []
    for group in _by_union(_without_misspelt(findings, annotation)):
        for chosen in _choose(group, node):
            problems.append(_problem(chosen, node, path, annotation, elsewhere or {}))
    return problems


def unknown_key(
    node: Node, inner: Path, path: Path, known: Iterable[str], elsewhere: Mapping[str, str] | None = None
) -> Problem:
    """Return the problem of a key that is not among the known ones; `inner` is its path in `node`, at `path`."""
    choices = list(known)
    key = str(inner[-1])
    moved = f"did you mean {elsewhere[key]!r}?" if elsewhere and key in elsewhere else ""
    hint = moved or did_you_mean(key, choices) or (f"known keys: {', '.join(choices)}" if choices else "")
    return Problem("unknown key", format_path((*path, *inner)), nearest_origin(node, inner, key=True), hint)


def _finding(details: Any, node: Node) -> _Finding:
    location = list(details["loc"])
    kind = str(details["type"])
    last = location.pop() if location and kind in (_UNKNOWN_TYPES | _MISSING_TYPES) else None
    path: list[str | int] = []
    current: Node | None = node
    union: Path | None = None
    alternative = ""
    for step in location:
        below = descend(current, step) if current is not None else None
        if below is not None:
            path.append(step)
            current = below
        elif union is None:
            # pydantic names a union's alternative in the location; it is no step into the value.
            union, alternative = tuple(path), str(step)
    context = details.get("ctx", {})
    return _Finding(kind, tuple(path), last, context, str(details["msg"]), union, alternative)


def _without_misspelt(findings: list[_Finding], annotation: Any) -> list[_Finding]:
    """Return the findings without those of a missing key that is there, misspelt."""
    meant = {
        (one.path, nearest(str(one.last), known_keys(annotation, one.path)))
        for one in findings
        if one.kind in _UNKNOWN_TYPES
    }
    return [one for one in findings if one.kind not in _MISSING_TYPES or (one.path, one.last) not in meant]


def _by_union(findings: Iterable[_Finding]) -> list[list[_Finding]]:
    groups: dict[Any, list[_Finding]] = {}
    for index, finding in enumerate(findings):
        groups.setdefault(index if finding.union is None else finding.union, []).append(finding)
    return list(groups.values())


def _choose(group: list[_Finding], node: Node) -> list[list[_Finding]]:
    """Of a union's findings, return those of the alternative that was meant; all as one if none stands out.

    That is the alternative that fits the value's kind, and of several the one with the fewest findings.
    """
    alternatives: dict[str, list[_Finding]] = {}
    for finding in group:
        alternatives.setdefault(finding.alternative, []).append(finding)
    fitting = [
        found
        for found in alternatives.values()
        if not any((one.is_kind or one.kind in _OBJECT_TYPES) and one.path == group[0].union for one in found)
    ]
    if group[0].union is None or (len(alternatives) == 1 and len(group) == 1) or not fitting:
        return [group]
    return [[one] for one in min(fitting, key=len)]


def _problem(
    findings: list[_Finding], node: Node, path: Path, annotation: Any, elsewhere: Mapping[str, str]
) -> Problem:
    finding = findings[0]
    full = (*path, *finding.path)
    if finding.kind in _UNKNOWN_TYPES:
        known = known_keys(annotation, finding.path)
        return unknown_key(node, (*finding.path, str(finding.last)), path, known, elsewhere)
    origin = nearest_origin(node, finding.path, key=finding.kind in _MISSING_TYPES)
    if finding.kind in _MISSING_TYPES:
        if isinstance(finding.last, int):
            return Problem(f"has too few items: item {finding.last} is missing", format_path(full), origin)
        null = (*finding.path, str(finding.last))  # a null where one is no value counts as missing
        origin = nearest_origin(node, null, key=True) if find(node, null) is not None else origin
        return Problem("required key is missing", format_path((*full, str(finding.last))), origin)
    value = find(node, finding.path)
    assert value is not None
    message, hint = _message(findings, value, full)
    return Problem(message, format_path(full), origin, hint)


def _message(findings: list[_Finding], value: Node, path: Path) -> tuple[str, str]:
    finding = findings[0]
    if any(one.is_kind for one in findings):
        wanted = list(dict.fromkeys(_wanted(one) for one in findings if one.is_kind))
        return f"expected {' or '.join(wanted)}, got {describe(value)}", _hint(findings, value, path)
    if finding.kind in _BOUNDS:
        return f"{_BOUNDS[finding.kind].format(**finding.context)}, got {describe(value)}", ""
    if finding.kind in _OBJECT_TYPES:
        return "wants a Python object, which a recipe can't write", "leave it out"
    if finding.kind == "target_type":
        return "needs a component", "write its name"
    if finding.kind in ("string_too_short", "too_short"):
        least = finding.context.get("min_length", 1)
        return ("must not be empty" if least == 1 else f"must have at least {least} {_unit(value)}"), ""
    if finding.kind in ("string_too_long", "too_long"):
        return f"must have at most {finding.context.get('max_length')} {_unit(value)}", ""
    message = finding.message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return message[:1].lower() + message[1:], ""


def _unit(value: Node) -> str:
    return "characters" if isinstance(value, ScalarNode) else "items"


def _wanted(finding: _Finding) -> str:
    return _EXPECTED.get(finding.kind) or str(finding.context.get("expected"))


def _hint(findings: list[_Finding], value: Node, path: Path) -> str:
    """Return what to write instead, if that can be guessed."""
    kinds = {finding.kind for finding in findings}
    if isinstance(value, MapNode) and kinds & {"list_type", "tuple_type"}:
        return "begin each item with '- '"
    if not isinstance(value, ScalarNode) or value.expression is not None:
        return ""
    word = value.text.casefold()
    if isinstance(value.value, str):
        choices = [text for finding in findings for text in re.findall(r"'([^']*)'", _wanted(finding))]
        if choices and (guess := did_you_mean(value.value, choices)):
            return guess
        if kinds & {"bool_type", "bool_parsing"} and word in _FALSE_WORDS | _TRUE_WORDS:
            return f"write {'true' if word in _TRUE_WORDS else 'false'}"
        if word in _NULL_WORDS:
            return "nothing is written null"
        if kinds & {"list_type", "tuple_type"}:
            return f"write [{value.text}]" if value.plain else f"write [{quote(value.text)}]"
        return "remove the quotes" if not value.plain and _is_number(value.text) else ""
    if value.value is not None and ("string_type" in kinds or any("'" in _wanted(one) for one in findings)):
        quoted = quote(value.text)
        return f"write {quoted if value.origin.option is None else f'--{format_path(path)}={shlex.quote(quoted)}'}"
    if isinstance(value.value, float) and value.value.is_integer() and kinds & {"int_type", "int_from_float"}:
        return f"write {int(value.value)}"
    return ""


def _is_number(text: str) -> bool:
    try:
        return isinstance(resolve_plain(text), (bool, int, float))
    except ValueError:
        return False
