"""Tools that a conversation offers, and the calls of them in its answers, as chat templates read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_core.data.chat.conversation import RowError, describe, list_of, parsed

_CALL_KEYS = frozenset({"id", "type", "function", "index"})


def tools_of(value: Any, path: str) -> list[dict[str, Any]] | None:
    """The tools of a row, each a JSON schema with a name; None where it has none. JSON text is read."""
    if value is None or value == "":
        return None
    tools: list[dict[str, Any]] = []
    for number, tool in enumerate(list_of(value, path)):
        place = f"{path}[{number}]"
        tool = parsed(tool, place)
        if not isinstance(tool, Mapping):
            raise RowError(place, f"{describe(tool)}, not a tool such as {{type: function, function: {{name: …}}}}")
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowError(place, "is a tool without a name")
        tools.append(dict(tool))
    return tools or None


def tool_calls_of(value: Any, path: str) -> list[dict[str, Any]] | None:
    """The calls of an answer, each with its `function` of a name and arguments; None where it makes none.

    Arguments are an object, whether they are written as one or as its JSON text.
    """
    if value is None:
        return None
    calls = [
        _call(parsed(call, f"{path}[{number}]"), f"{path}[{number}]")
        for number, call in enumerate(list_of(value, path))
    ]
    return calls or None


def _call(call: Any, path: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise RowError(path, f"{describe(call)}, not a call such as {{function: {{name: …, arguments: …}}}}")
    is_nested = call.get("function") is not None
    function, place = (call["function"], f"{path}.function") if is_nested else (call, path)
    if not isinstance(function, Mapping):
        raise RowError(place, f"{describe(function)}, not a function with a name and arguments")
    known = _CALL_KEYS if is_nested else _CALL_KEYS | {"name", "arguments"}
    _refuse_unknown(call, known, path)
    if is_nested:
        _refuse_unknown(function, frozenset({"name", "arguments"}), place)
    if call.get("type") not in (None, "function"):
        raise RowError(f"{path}.type", f"is {call['type']!r}, not 'function'")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RowError(f"{place}.name", f"{describe(name)}, not the name of a function")
    arguments = parsed(function.get("arguments"), f"{place}.arguments")
    if not isinstance(arguments, Mapping):
        raise RowError(f"{place}.arguments", f"{describe(arguments)}, not an object")
    identity = {} if call.get("id") is None else {"id": call["id"]}
    return {"type": "function", **identity, "function": {"name": name, "arguments": dict(arguments)}}


def _refuse_unknown(value: Mapping[str, Any], known: frozenset[str], path: str) -> None:
    for key, inner in value.items():
        if key not in known and inner is not None:
            raise RowError(f"{path}.{key}", "is unknown in a call of a tool")
