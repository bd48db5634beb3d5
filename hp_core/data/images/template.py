"""What a chat template does with images, and templates that take nothing but lists of parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hp_core.data.chat.template import ChatTemplate, Rendering, TemplateError, Turn
from hp_core.data.fingerprint import fingerprint
from hp_core.errors import ArgumentError

_WORD = "Zq0wordqZ"
_ANSWER: Turn = {"role": "assistant", "content": "an answer"}


class PartsTemplate:
    """A template that is given every text as a list of one part."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.fingerprint = fingerprint("texts as parts", template.fingerprint)

    def render(
        self,
        messages: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = False,
    ) -> Rendering:
        """The text of a conversation. Raises `TemplateError`."""
        turns = [
            {**turn, "content": [{"type": "text", "text": turn["content"]}]}
            if isinstance(turn.get("content"), str)
            else turn
            for turn in messages
        ]
        return self.template.render(turns, tools, add_generation_prompt=add_generation_prompt)


def template_of_images(template: ChatTemplate, token: str) -> ChatTemplate:
    """The template as conversations with images need it.

    Raises:
        ArgumentError: it doesn't write `token` once for an image and the text beside it.
    """
    turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": _WORD}]}
    reason = ""
    for candidate in (template, PartsTemplate(template)):
        try:
            text = candidate.render([turn, _ANSWER], None).text
        except TemplateError as error:
            reason = reason or str(error)
            continue
        if text.count(token) != 1 or _WORD not in text:
            reason = reason or f"it writes {token!r} {text.count(token)} times for one image"
        elif _shows_text(candidate):
            return candidate
    raise ArgumentError(
        "chat_template", f"the chat template renders no turns with images: {reason}", "give one that does"
    )


def _shows_text(template: ChatTemplate) -> bool:
    try:
        return _WORD in template.render([{"role": "user", "content": _WORD}, _ANSWER], None).text
    except TemplateError:
        return False
