"""A row of text or messages as the tokens of a prompt and of two answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hp_core import ArgumentError, InputError, Tokenizer
from hp_core.data.chat.conversation import Conversation, RowError
from hp_core.data.chat.encoder import ChatEncoder, ChatSettings
from hp_core.data.chat.formats import named_format
from hp_core.data.chat.template import ChatTokenizer
from hp_core.data.chat.tokens import CutError, Cutter
from hp_core.data.images.protocol import ImageTokenizer
from hp_core.data.records import Fields, Row

FIELDS = Fields(("chosen", "rejected"), ("prompt", "tools", "images", "image"))
# Each token of an answer, and the same as a target; -100 where it is none, as in the header of a turn, or a prompt.
Answer = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TokenPair:
    """A prompt, which both answers share, and the answers with their end tokens."""

    prompt: tuple[int, ...]
    chosen: Answer
    rejected: Answer
    location: str

    @property
    def num_tokens(self) -> int:
        """Those of a row: the prompt counts twice."""
        return 2 * len(self.prompt) + len(self.chosen) + len(self.rejected)


def parts_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt and both answers of a row in one of TRL's formats. Raises `RowError` for what is no pair."""
    for name in ("chosen", "rejected"):
        if fields.get(name) is None:
            raise RowError(name, f"is missing; the row has: {', '.join(map(str, fields)) or 'nothing'}")
    if held := [name for name in ("images", "image") if fields.get(name)]:
        raise RowError(held[0], "holds images, and pairs are texts")
    chosen, rejected, prompt = fields["chosen"], fields["rejected"], fields.get("prompt")
    if chosen == rejected:
        raise RowError("rejected", "is the same as chosen, so there is nothing to prefer")
    if prompt is None and isinstance(chosen, list) and isinstance(rejected, list):
        shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
        if shared is None:
            name = "chosen" if len(chosen) < len(rejected) else "rejected"
            raise RowError(name, "is what the other begins with, so it has no answer of its own")
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if not prompt:
        raise RowError("prompt", "is missing or empty; an answer follows something")
    parts = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    if odd := [name for name, one in parts.items() if not isinstance(one, (str, list))]:
        raise RowError(odd[0], f"is {parts[odd[0]]!r}, neither a text nor a list of messages")
    return parts


@dataclass(frozen=True)
class AnswerFormat:
    """The conversation that ends with one of the answers, of which nothing before it is trained."""

    name: str
    fields: Fields = FIELDS
    identity: str = "an answer of a pair"

    def __call__(self, fields: Mapping[str, Any]) -> Conversation:
        """Raises `RowError` for an answer that is none."""
        parts = parts_of(fields)
        whole = {"prompt": parts["prompt"], "completion": parts[self.name], "tools": fields.get("tools")}
        try:
            conversation = named_format("prompt_completion")(whole)
        except RowError as error:
            raise RowError(error.path.replace("completion", self.name), error.reason) from error
        size = len(parts["prompt"]) if isinstance(parts["prompt"], list) else 1
        before = tuple(replace(one, train=False) for one in conversation.messages[:size])
        answer = [replace(one, path=one.path.replace("completion", self.name)) for one in conversation.messages[size:]]
        if others := [one.role for one in answer if one.role not in ("assistant", "tool")]:
            raise RowError(self.name, f"holds a turn of role {others[0]!r}; an answer is the assistant's")
        if not any((one.content or "").strip() or "tool_calls" in one.extras for one in answer):
            raise RowError(self.name, "is empty")
        if weighted := [one.path for one in answer if one.weight not in (0, 1)]:
            raise RowError(weighted[0], "has a weight; turns of a pair are trained, or with train: false not")
        return replace(conversation, messages=(*before, *answer))


class PairEncoder:
    """Reads the formats of TRL: texts, messages, and messages whose prompt is what both answers begin with."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None) -> None:
        """Raises `ArgumentError` for a template that is none, or that the tokenizer can't take."""
        if not isinstance(tokenizer, Tokenizer):
            raise ArgumentError("tokenizer", "must be a finished one", "write tokenizer: bytes, for one")
        if isinstance(tokenizer, ImageTokenizer):
            raise ArgumentError("tokenizer", "takes images, and pairs are texts", "write name: pretrained")
        is_chat = isinstance(tokenizer, ChatTokenizer)
        if chat_template is not None and not is_chat:
            raise ArgumentError("chat_template", "needs a tokenizer with special tokens", "name a pretrained one")
        self.tokenizer = tokenizer if chat_template is None else tokenizer.with_chat_template(chat_template)
        self._cutter = Cutter(tokenizer) if is_chat else None
        self._chats: dict[str, ChatEncoder] = {}
        # So far no row has had messages.
        self.is_template_unused = chat_template is not None

    def encode(self, row: Row) -> TokenPair:
        """Raises `InputError` for what is no pair, with the row's place."""
        try:
            parts = parts_of(row.fields)
            side = self._text_side if all(isinstance(one, str) for one in parts.values()) else self._chat_side
            one, other = (side(row, parts["prompt"], parts[name], name) for name in FIELDS[:2])
            size = min(next(i for i, (_, label) in enumerate(answer) if label >= 0) for answer in (one, other))
            if not size or one[:size] != other[:size]:
                raise RowError("prompt", "has no tokens, or others, before one of the answers")
        except (RowError, CutError) as error:
            raise InputError(f"{row.location}: {error}") from error
        return TokenPair(tuple(token for token, _ in one[:size]), one[size:], other[size:], row.location)

    def _text_side(self, row: Row, prompt: str, answer: str, name: str) -> Answer:
        if not answer.strip():
            raise RowError(name, "is empty")
        if self._cutter is None:
            head, tail = self.tokenizer.encode_batch([prompt, answer])
        else:
            (placed,) = self._cutter.tokenizer.place([prompt + answer])
            tokens = self._cutter.cut(prompt + answer, [len(prompt)], placed)
            size = int((tokens.ends <= len(prompt)).sum())
            # What the tokenizer begins every text with.
            head = [*self.tokenizer.encode_batch([""])[0], *tokens.ids[:size].tolist()]
            tail = tokens.ids[size:].tolist()
        return (*((one, -100) for one in head), *((one, one) for one in [*tail, self.tokenizer.eos_id]))

    def _chat_side(self, row: Row, prompt: Any, answer: Any, name: str) -> Answer:
        if self._cutter is None:
            raise RowError(name, "messages need another tokenizer; write tokenizer: {name: pretrained, path: …}")
        if name not in self._chats:
            self.is_template_unused = False
            self._chats[name] = ChatEncoder.of(ChatSettings(AnswerFormat(name)), self.tokenizer)
        (encoded,) = self._chats[name].encode([row])
        if isinstance(encoded, InputError):
            raise encoded
        trained = np.flatnonzero(encoded.trained)
        if not len(trained):
            raise RowError(name, "holds nothing that is trained")
        labels = np.where(encoded.trained, encoded.ids, -100)
        end = trained[-1] + 1
        return tuple(zip(encoded.ids[:end].tolist(), labels[:end].tolist(), strict=True))
