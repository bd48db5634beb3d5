"""What chats need of a tokenizer beyond `Tokenizer`: its chat template, and the place of each token in a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hp_core.data.protocols import Tokenizer

Turn = Mapping[str, Any]


class TemplateError(Exception):
    """A chat template can't render a conversation; the text is its own reason, or that of the engine."""


class Rendering(NamedTuple):
    """A conversation as text, and the places of its generation marks; None if the template has no such marks."""

    text: str
    marks: tuple[tuple[int, int], ...] | None = None


class PlacedTokens(NamedTuple):
    """Ids, and for each the characters `[start, end)` of the text that it stands for, untrimmed.

    Several tokens may share a character, and a special token may hold the blanks beside it.
    """

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


class ChatTemplate(Protocol):
    """Renders conversations."""

    @property
    def fingerprint(self) -> str:
        """A hash of everything that changes a text: the template, its arguments, the engine."""
        ...

    def render(
        self,
        messages: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = False,
    ) -> Rendering:
        """The text of a conversation. Raises `TemplateError`."""
        ...


@runtime_checkable
class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that can be trained on chats."""

    @property
    def stop_tokens(self) -> Mapping[str, int]:
        """The special tokens that may end an answer, with their ids: neither BOS nor the unknown token."""
        ...

    def chat_template(
        self, template: str | None = None, *, arguments: Mapping[str, Any] | None = None, date: str | None = None
    ) -> ChatTemplate:
        """Its chat template, or the given one, with arguments for it and the date (ISO 8601) that it is to print.

        Raises `ArgumentError` for `chat_template`, `chat_template_kwargs` or `date`: no template, one that is no
        template, an argument or date that it has no use for, a date that it needs.
        """
        ...

    def with_chat_template(self, template: str) -> Tokenizer:
        """The same tokenizer, which is saved with the given chat template (as for `chat_template`)."""
        ...

    def place(self, texts: Sequence[str]) -> list[PlacedTokens]:
        """The tokens of each text, in which special tokens count as such; none is added."""
        ...

    def spell(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        ...


@runtime_checkable
class ReservesTokens(Protocol):
    """A tokenizer some of whose tokens stand for what is no text."""

    @property
    def reserved_tokens(self) -> tuple[str, ...]:
        """These tokens: those of images and videos, and those around them."""
        ...


def reserved_fault(text: str, reserved: Sequence[str]) -> str | None:
    """What is wrong with a text that spells a reserved token; None if it spells none."""
    token = next((one for one in reserved if one in text), None)
    return None if token is None else f"its text spells {token!r}, which stands for images or videos; take it out"
