"""A conversation as a row holds it, whatever its format, and the checks of its values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_core.data.columns import float32_fault
from hp_core.spelling import did_you_mean

ROLES = ("system", "developer", "user", "assistant", "tool")
# What a template may read of a message beside its role and content.
EXTRAS = ("name", "tool_calls", "tool_call_id", "reasoning_content")


class RowError(Exception):
    """What is wrong with a row: the column path (`messages[2].content`) and the reason."""

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {reason}")


@dataclass(frozen=True)
class Message:
    """One turn. `content` is None where the row has none, as beside tool calls; `path` is its place in the row.

    `train` is what the row says of this turn, None if nothing. `weight` is what each of its tokens counts for.
    """

    role: str
    content: str | None
    path: str
    extras: Mapping[str, Any] = field(default_factory=dict)
    train: bool | None = None
    weight: float = 1.0

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        content = {} if self.content is None else {"content": self.content}
        return {"role": self.role, **content, **self.extras}


@dataclass(frozen=True)
class Conversation:
    """The turns of a row in order, and the tools that it offers, if any."""

    messages: tuple[Message, ...]
    tools: list[dict[str, Any]] | None = None

    def check(self, path: str) -> Conversation:
        """Itself. Raises `RowError` where the turns can't be a conversation, whatever the template."""
        if not self.messages:
            raise RowError(path, "the conversation is empty")
        first = next((one for one in self.messages if one.role not in ("system", "developer")), None)
        if first is not None and first.role != "user":
            raise RowError(
                f"{first.path}.role", f"the conversation begins with {_article(first.role)} turn, not a user's"
            )
        if all(one.role != "assistant" for one in self.messages):
            raise RowError(path, "the conversation has no assistant turn, so nothing to train")
        return self

    def content_bytes(self) -> bytes:
        """What makes two conversations the same. Raises `RowError` for half a surrogate pair, which JSON can hold."""
        turns = [one.for_template() for one in self.messages]
        text = json.dumps([turns, self.tools], ensure_ascii=False, sort_keys=True)
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            raise self._surrogate(text[error.start]) from error

    def _surrogate(self, character: str) -> RowError:
        for one in self.messages:
            if one.content is not None and character in one.content:
                place = one.content.index(character) + 1
                return RowError(f"{one.path}.content", f"character {place} is {character!a}, half of a surrogate pair")
        return RowError(self.messages[0].path, f"a text holds {character!a}, half of a surrogate pair")


def _article(role: str) -> str:
    return f"an {role}" if role[0] in "aeiou" else f"a {role}"


def describe(value: Any) -> str:
    """What a value of the wrong type is, for messages: `is null`, `is a number`."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", dict: "an object", list: "a list"}
    if value is None:
        return "is null"
    return f"is {names.get(type(value), f'of type {type(value).__name__}')}"


def text_of(value: Any, path: str) -> str:
    """A text, or a list of `{type: text, text: …}` parts, whose texts are joined as they are."""
    if isinstance(value, str):
        return value
    if not isinstance(value, (list, tuple)):
        raise RowError(path, f"{describe(value)}, not text")
    parts: list[str] = []
    for number, part in enumerate(value):
        place = f"{path}[{number}]"
        if not isinstance(part, Mapping):
            raise RowError(place, f"{describe(part)}, not a part such as {{type: text, text: …}}")
        if part.get("type") != "text":
            raise RowError(f"{place}.type", f"is {part.get('type')!r}; only parts of type 'text' can be trained on")
        for key, inner in part.items():
            if key not in ("type", "text") and inner is not None:
                raise RowError(f"{place}.{key}", "is unknown in a part of type 'text'")
        if not isinstance(part.get("text"), str):
            raise RowError(f"{place}.text", f"{describe(part.get('text'))}, not text")
        parts.append(part["text"])
    return "".join(parts)


def train_of(value: Any, path: str) -> bool | None:
    """Whether a turn says that it is trained; None if it doesn't say."""
    if value is None or isinstance(value, bool):
        return value
    raise RowError(path, f"is {value!r}, not true or false")


def weight_of(value: Any, path: str) -> float:
    """What each token of a turn counts for; 1 if it doesn't say."""
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RowError(path, f"is {value!r}, not a number")
    if not math.isfinite(value) or value < 0:
        raise RowError(path, f"is {value}, not a finite number from 0 on")
    if (fault := float32_fault(value)) is not None:
        raise RowError(path, fault)
    return float(value)


def list_of(value: Any, path: str) -> Sequence[Any]:
    """A list, or the text of one in JSON, as columns of CSV and many Parquet files hold it."""
    value = parsed(value, path)
    if not isinstance(value, (list, tuple)):
        raise RowError(path, f"{describe(value)}, not a list")
    return value


def parsed(value: Any, path: str) -> Any:
    """The value of a JSON text; anything that isn't text as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise RowError(path, f"is text that is not JSON: {error}") from error
    except RecursionError as error:
        raise RowError(path, "is JSON text that is nested too deep") from error


def role_of(value: Any, path: str, roles: Mapping[str, str]) -> str:
    """The standard role that `roles` gives for the row's word."""
    if not isinstance(value, str):
        raise RowError(path, f"{describe(value)}, not text")
    if value not in roles:
        guess = did_you_mean(value, roles)
        raise RowError(path, f"is {value!r}; roles are: {', '.join(roles)}" + (f"; {guess}" if guess else ""))
    return roles[value]
