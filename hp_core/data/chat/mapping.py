"""A format of the recipe's own: which columns and keys hold what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_core.data.chat.conversation import EXTRAS, ROLES
from hp_core.data.chat.formats import CALL, Columns, ConversationFormat, Turns, check_columns
from hp_core.errors import ArgumentError
from hp_core.spelling import did_you_mean

_TURN_KEYS = ("train", "weight", *EXTRAS)
_TURNS = frozenset({"messages", "role", "content", "roles", "system", "tools", *_TURN_KEYS})
_COLUMNS = frozenset({"user", "assistant", "system", "train", "weight"})


def mapped_format(mapping: Mapping[str, Any], argument: str = "mapping") -> ConversationFormat:
    """The format that a mapping describes.

    Either `{messages: dialog, role: speaker, content: text, roles: {bot: assistant}}`: a column of turns, with the
    keys of a turn, the row's words for roles, and columns for `system` and `tools`. Or `{user: question, assistant:
    answer, system: context}`: columns for one question and its answer. Raises `ArgumentError` for a key that is
    unknown or missing, and for a value that is no name.
    """
    is_turns = "messages" in mapping
    known = _TURNS if is_turns else _COLUMNS
    for key in mapping:
        if key not in known:
            guess = did_you_mean(str(key), known) or f"with these keys it takes: {', '.join(sorted(known))}"
            raise ArgumentError(f"{argument}.{key}", "unknown key", guess)
    for key, value in mapping.items():
        if key != "roles" and not (isinstance(value, str) and value):
            raise ArgumentError(f"{argument}.{key}", f"is {value!r}, not the name of a column or key")
    if is_turns:
        return _turns(mapping, argument)
    for needed in ("user", "assistant"):
        if needed not in mapping:
            hint = "give `user` and `assistant` columns, or a column of `messages`"
            raise ArgumentError(argument, f"{needed!r} is missing", hint)
    if repeated := check_columns(list(mapping.values())):
        raise ArgumentError(argument, f"the column {repeated!r} is named twice")
    return Columns(
        (mapping["user"],),
        mapping["assistant"],
        mapping.get("system"),
        None,
        mapping.get("train"),
        mapping.get("weight"),
    )


def _turns(mapping: Mapping[str, Any], argument: str) -> Turns:
    roles = _roles(mapping.get("roles", {}), f"{argument}.roles")
    keys = {name: mapping[name] for name in _TURN_KEYS if name in mapping}
    role, content = mapping.get("role", "role"), mapping.get("content", "content")
    if repeated := check_columns([role, content, *keys.values()]):
        raise ArgumentError(argument, f"the key {repeated!r} of a turn is named twice")
    columns = [mapping[name] for name in ("messages", "system", "tools") if name in mapping]
    if repeated := check_columns(columns):
        raise ArgumentError(argument, f"the column {repeated!r} is named twice")
    return Turns(
        mapping["messages"],
        role,
        content,
        roles,
        keys,
        system=mapping.get("system"),
        tools=mapping.get("tools"),
        needs_all=True,
        takes_any_key=True,
    )


def _roles(given: Any, argument: str) -> Mapping[str, str]:
    """The standard roles under their own names, and the row's words for them."""
    if not isinstance(given, Mapping):
        raise ArgumentError(argument, f"is {given!r}, not a mapping such as {{bot: assistant}}")
    allowed = (*ROLES, CALL)
    for word, role in given.items():
        if not isinstance(word, str):
            raise ArgumentError(argument, f"{word!r} is not text", "put it in quotes")
        if role not in allowed:
            guess = did_you_mean(str(role), allowed)
            raise ArgumentError(f"{argument}.{word}", f"{role!r} is no role; roles are: {', '.join(allowed)}", guess)
    return {**{role: role for role in ROLES}, **given}
