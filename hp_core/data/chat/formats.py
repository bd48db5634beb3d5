"""The formats of conversations: how the turns stand in a row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol

from hp_core.data.chat.conversation import (
    EXTRAS,
    ROLES,
    Conversation,
    Message,
    Part,
    RowError,
    content_of,
    describe,
    list_of,
    parsed,
    role_of,
    text_of,
    train_of,
    weight_of,
)
from hp_core.data.chat.tool_calls import tool_calls_of, tools_of
from hp_core.data.records import Fields
from hp_core.spelling import did_you_mean

FormatName = Literal["messages", "sharegpt", "alpaca", "prompt_completion"]

# A role of the row that stands for an assistant turn whose text is a call.
CALL = "function_call"

OPENAI_ROLES: Mapping[str, str] = {**{role: role for role in ROLES}, "function": "tool"}
SHAREGPT_ROLES: Mapping[str, str] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    CALL: CALL,
}
_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")


class ConversationFormat(Protocol):
    """Makes the conversation of a row."""

    @property
    def fields(self) -> Fields:
        """The columns that are read."""
        ...

    @property
    def identity(self) -> str:
        """What changes the conversations of the same rows, for a fingerprint: the same in every process."""
        ...

    def __call__(self, fields: Mapping[str, Any]) -> Conversation:
        """The conversation. Raises `RowError` for what is missing, of another type or unknown."""
        ...


@dataclass(frozen=True)
class _Identified:
    """A format all of whose settings change what it makes of a row."""

    @property
    def identity(self) -> str:
        """Its kind and its settings."""
        # Sorted, because the order of a set depends on the process.
        return json.dumps([type(self).__name__, asdict(self)], sort_keys=True, default=sorted)


@dataclass(frozen=True)
class Turns(_Identified):
    """A column that lists the turns, each an object with a role and a content.

    `keys` are the row's words for what a turn holds (`content`, `train`, `weight` and those of `EXTRAS`). A key of a
    turn that is none of them is refused unless `takes_any_key`. `system` and `tools` are columns of the row.
    """

    column: str = "messages"
    role: str = "role"
    content: str = "content"
    roles: Mapping[str, str] = field(default_factory=lambda: OPENAI_ROLES)
    keys: Mapping[str, str] = field(default_factory=lambda: {name: name for name in ("train", "weight", *EXTRAS)})
    system: str | None = None
    tools: str | None = "tools"
    needs_all: bool = False
    takes_any_key: bool = False

    @property
    def fields(self) -> Fields:
        """The columns that are read, those that may be missing included."""
        others = [name for name in (self.system, self.tools) if name is not None]
        return Fields((self.column, *others)) if self.needs_all else Fields((self.column,), others)

    def __call__(self, fields: Mapping[str, Any]) -> Conversation:
        """The conversation of a row."""
        turns = list_of(required(fields, self.column), self.column)
        messages = [self.message(turn, f"{self.column}[{number}]") for number, turn in enumerate(turns)]
        if self.system is not None and (text := self._optional(fields, self.system)) not in (None, ""):
            messages.insert(0, Message("system", text_of(text, self.system), self.system))
        tools = None if self.tools is None else tools_of(self._optional(fields, self.tools), self.tools)
        return Conversation(tuple(messages), tools).check(self.column)

    def _optional(self, fields: Mapping[str, Any], name: str) -> Any:
        return required(fields, name) if self.needs_all else fields.get(name)

    def message(self, turn: Any, path: str) -> Message:
        """One turn of the list."""
        if not isinstance(turn, Mapping):
            raise RowError(path, f"{describe(turn)}, not a turn with {self.role!r} and {self.content!r}")
        if not self.takes_any_key:
            self._refuse_unknown(turn, path)
        if self.role not in turn:
            raise RowError(f"{path}.{self.role}", _missing(self.role, turn))
        role = role_of(turn[self.role], f"{path}.{self.role}", self.roles)
        value, place = turn.get(self.content), f"{path}.{self.content}"
        extras = self._extras(turn, path)
        content: str | None = None
        parts: tuple[Part, ...] = ()
        if role == CALL:
            role, extras = "assistant", {**extras, "tool_calls": _written_calls(value, place)}
        elif value is not None:
            content, parts = content_of(value, place)
            if parts and role == "assistant":
                raise RowError(place, "an answer can't hold an image")
        elif role != "assistant" or "tool_calls" not in extras:
            raise RowError(place, "is null, not text" if self.content in turn else _missing(self.content, turn))
        if role != "assistant" and (wrong := next((one for one in _ANSWER_EXTRAS if one in extras), None)):
            raise RowError(f"{path}.{self.keys[wrong]}", f"stands in a turn of role {role!r}; only answers have it")
        train = train_of(self._value(turn, "train"), f"{path}.{self.keys.get('train')}")
        weight = weight_of(self._value(turn, "weight"), f"{path}.{self.keys.get('weight')}")
        return Message(role, content, path, extras, train, weight, parts)

    def _value(self, turn: Mapping[str, Any], name: str) -> Any:
        return turn.get(self.keys[name]) if name in self.keys else None

    def _extras(self, turn: Mapping[str, Any], path: str) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        for name in EXTRAS:
            key = self._thought(turn, path) if name == "reasoning_content" else self.keys.get(name)
            value = None if key is None else turn.get(key)
            if value is None:
                continue
            place = f"{path}.{key}"
            if name == "tool_calls":
                value = tool_calls_of(value, place)
            elif not isinstance(value, str):
                raise RowError(place, f"{describe(value)}, not text")
            if value:
                extras[name] = value
        return extras

    def _thought(self, turn: Mapping[str, Any], path: str) -> str | None:
        """The key of the turn's thought, if it may have one."""
        if self.takes_any_key:
            return self.keys.get("reasoning_content")
        given = [one for one in _REASONING_NAMES if turn.get(one) not in (None, "")]
        for other in given[1:]:
            if turn[other] != turn[given[0]]:
                raise RowError(f"{path}.{other}", f"is another thought than that under {given[0]!r}; a turn has one")
        return given[0] if given else None

    def _refuse_unknown(self, turn: Mapping[str, Any], path: str) -> None:
        known = (self.role, self.content, *self.keys.values(), *_REASONING_NAMES)
        for key, value in turn.items():
            # Arrow gives every turn the keys of all turns; those that a turn lacks are null.
            if key not in known and value is not None:
                guess = did_you_mean(str(key), known)
                hint = guess or "with a `mapping` only the keys that it names are read"
                raise RowError(f"{path}.{key}", f"unknown key; {hint}")


_ANSWER_EXTRAS = ("tool_calls", "reasoning_content")


@dataclass(frozen=True)
class Columns(_Identified):
    """One question and its answer in columns of their own, maybe with turns before them.

    `user` are columns whose texts are joined by a line end; those that are empty or, of `optional`, missing are left
    out. `history` is a column of [question, answer] pairs.
    """

    user: tuple[str, ...]
    assistant: str
    system: str | None = None
    history: str | None = None
    train: str | None = None
    weight: str | None = None
    optional: frozenset[str] = frozenset()

    @property
    def fields(self) -> Fields:
        """The columns that are read, those that may be missing included."""
        others = (self.system, self.history, self.train, self.weight)
        names = (*self.user, self.assistant, *(name for name in others if name is not None))
        return Fields((name for name in names if name not in self.optional), self.optional)

    def __call__(self, fields: Mapping[str, Any]) -> Conversation:
        """The conversation of a row."""
        messages: list[Message] = []
        if self.system is not None and (text := self._value(fields, self.system)) not in (None, ""):
            messages.append(Message("system", text_of(text, self.system), self.system))
        if self.history is not None and (pairs := self._value(fields, self.history)) is not None:
            messages.extend(_history(pairs, self.history))
        first = self.user[0]
        texts = [text_of(required(fields, first), first)]
        for name in self.user[1:]:
            value = self._value(fields, name)
            texts += [] if value in (None, "") else [text_of(value, name)]
        messages.append(Message("user", "\n".join(texts), first))
        answer = text_of(required(fields, self.assistant), self.assistant)
        train = None if self.train is None else train_of(self._value(fields, self.train), self.train)
        weight = 1.0 if self.weight is None else weight_of(self._value(fields, self.weight), self.weight)
        messages.append(Message("assistant", answer, self.assistant, {}, train, weight))
        return Conversation(tuple(messages)).check(first)

    def _value(self, fields: Mapping[str, Any], name: str) -> Any:
        return fields.get(name) if name in self.optional else required(fields, name)


@dataclass(frozen=True)
class PromptCompletion(_Identified):
    """A `prompt` and its `completion`, each a text or a list of turns; answers in the prompt are not trained."""

    turns: Turns = field(default_factory=Turns)

    @property
    def fields(self) -> Fields:
        """The columns that are read, those that may be missing included."""
        return Fields(("prompt", "completion"), ("tools",))

    def __call__(self, fields: Mapping[str, Any]) -> Conversation:
        """The conversation of a row."""
        prompt, completion = required(fields, "prompt"), required(fields, "completion")
        messages = self._side(prompt, "prompt", "user")
        messages = [_untrained(one) if one.role == "assistant" else one for one in messages]
        answers = self._side(completion, "completion", "assistant")
        if answers and answers[0].role != "assistant":
            raise RowError(
                f"{answers[0].path}.role", f"is {answers[0].role!r}; a completion begins with the assistant's"
            )
        tools = tools_of(fields.get("tools"), "tools")
        return Conversation((*messages, *answers), tools).check("completion")

    def _side(self, value: Any, column: str, role: str) -> list[Message]:
        if isinstance(value, str):
            return [Message(role, value, column)]
        if not isinstance(value, (list, tuple)):
            raise RowError(column, f"{describe(value)}, neither text nor a list of messages")
        if not value:
            raise RowError(column, "is an empty list")
        return [self.turns.message(turn, f"{column}[{number}]") for number, turn in enumerate(value)]


def required(fields: Mapping[str, Any], name: str) -> Any:
    """The value of a column. Raises `RowError`, with the columns that are there, when it is missing."""
    if name not in fields:
        raise RowError(name, f"the row has no such column; {_columns(name, fields)}")
    return fields[name]


def _columns(name: str, fields: Mapping[str, Any]) -> str:
    guess = did_you_mean(name, map(str, fields))
    return f"its columns are: {', '.join(map(str, fields)) or 'none'}" + (f"; {guess}" if guess else "")


def _missing(name: str, turn: Mapping[str, Any]) -> str:
    guess = did_you_mean(name, map(str, turn))
    return f"is missing; the turn has: {', '.join(map(str, turn)) or 'nothing'}" + (f"; {guess}" if guess else "")


def _untrained(message: Message) -> Message:
    train = False if message.train is None else message.train
    return replace(message, train=train)


def _history(pairs: Any, path: str) -> list[Message]:
    messages: list[Message] = []
    for number, pair in enumerate(list_of(pairs, path)):
        place = f"{path}[{number}]"
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise RowError(place, "is not a pair of a question and an answer")
        messages.append(Message("user", text_of(pair[0], f"{place}[0]"), f"{place}[0]"))
        messages.append(Message("assistant", text_of(pair[1], f"{place}[1]"), f"{place}[1]"))
    return messages


def _written_calls(value: Any, path: str) -> list[dict[str, Any]]:
    calls = parsed(value, path)
    found = tool_calls_of(calls if isinstance(calls, (list, tuple)) else [calls], path)
    if not found:
        raise RowError(path, "holds no call")
    return found


def named_format(name: FormatName) -> ConversationFormat:
    """The format of that name."""
    if name == "messages":
        return Turns()
    if name == "sharegpt":
        return Turns("conversations", "from", "value", SHAREGPT_ROLES, system="system")
    if name == "alpaca":
        optional = frozenset({"input", "system", "history"})
        return Columns(("instruction", "input"), "output", "system", "history", optional=optional)
    return PromptCompletion()


def check_columns(names: Sequence[str]) -> str | None:
    """The first column that is named twice, or None."""
    return next((name for number, name in enumerate(names) if name in names[:number]), None)
