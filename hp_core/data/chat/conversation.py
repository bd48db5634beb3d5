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
class ImagePart:
    """An image in a turn: what the row says of it, None for the next of the row's own images; `path` is its place."""

    value: Any
    path: str


Part = str | ImagePart


@dataclass(frozen=True)
class Message:
    """One turn. `content` is None where the row has none, as beside tool calls; `path` is its place in the row.

    `train` is what the row says of this turn, None if nothing. `weight` is what each of its tokens counts for. `parts`
    are the texts and images of a turn that has images, in order; its `content` is the texts, joined.
    """

    role: str
    content: str | None
    path: str
    extras: Mapping[str, Any] = field(default_factory=dict)
    train: bool | None = None
    weight: float = 1.0
    parts: tuple[Part, ...] = ()

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        content: dict[str, Any] = {} if self.content is None else {"content": self.content}
        if self.parts:
            content["content"] = [
                {"type": "text", "text": one} if isinstance(one, str) else {"type": "image"} for one in self.parts
            ]
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

    @property
    def images(self) -> list[ImagePart]:
        """The images of all turns, in order."""
        return [part for one in self.messages for part in one.parts if isinstance(part, ImagePart)]

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


def shortened(text: str, most: int = 60) -> str:
    """The text with its middle left out if it is long, for messages."""
    begin = (most - 1) // 2
    return text if len(text) <= most else f"{text[:begin]}…{text[len(text) - (most - 1 - begin) :]}"


def _shown(value: Any) -> str:
    return repr(shortened(value)) if isinstance(value, str) else shortened(repr(value))


def text_of(value: Any, path: str) -> str:
    """A text, or a list of `{type: text, text: …}` parts, whose texts are joined as they are."""
    text, parts = content_of(value, path)
    if parts:
        image = next(one for one in parts if isinstance(one, ImagePart))
        raise RowError(image.path, "is an image, and only a turn of a conversation can hold one")
    return text


def content_of(value: Any, path: str) -> tuple[str, tuple[Part, ...]]:
    """The text of a turn, with its parts if there are images among them."""
    if isinstance(value, str):
        return value, ()
    if not isinstance(value, (list, tuple)):
        raise RowError(path, f"{describe(value)}, not text")
    parts = [_part(one, f"{path}[{number}]") for number, one in enumerate(value)]
    texts = "".join(one for one in parts if isinstance(one, str))
    return texts, tuple(parts) if any(isinstance(one, ImagePart) for one in parts) else ()


# What a part of each type holds beside its type.
_PART_KEYS: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "image": ("image", "path", "url", "base64", "bytes"),
    "image_url": ("image_url",),
}


def _part(part: Any, place: str) -> Part:
    if not isinstance(part, Mapping):
        raise RowError(place, f"{describe(part)}, not a part such as {{type: text, text: …}}")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _PART_KEYS:
        raise RowError(
            f"{place}.type", f"is {_shown(kind)}; parts of these types can be trained on: {', '.join(_PART_KEYS)}"
        )
    # Arrow gives every part the keys of all parts; those that a part lacks are null.
    given = {key: inner for key, inner in part.items() if key != "type" and inner is not None}
    for key in given:
        if key not in _PART_KEYS[kind]:
            raise RowError(f"{place}.{key}", f"is unknown in a part of type {kind!r}")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise RowError(f"{place}.text", f"{describe(part.get('text'))}, not text")
        return str(part["text"])
    if len(given) > 1:
        raise RowError(place, f"gives its image in several ways: {', '.join(given)}")
    if not given:
        return ImagePart(None, place)
    ((key, inner),) = given.items()
    if key == "image":
        return ImagePart(inner, f"{place}.{key}")
    if key == "image_url" and isinstance(inner, Mapping):
        return ImagePart({"url": inner.get("url")}, f"{place}.{key}")
    return ImagePart({key: inner}, place)


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
