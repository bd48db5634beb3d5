"""A row of text or messages as the tokens of a prompt and of two answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hp_core import ArgumentError, InputError, Tokenizer
from hp_core.data.chat.conversation import RowError
from hp_core.data.chat.formats import named_format
from hp_core.data.chat.spans import Marker
from hp_core.data.chat.template import ChatTokenizer, TemplateError
from hp_core.data.chat.tokens import CutError, Cutter, covered
from hp_core.data.records import Fields, Row

# Each token of an answer, and the same as a target; -100 where it is none, as in the header of a turn.
Answer = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TokenPair:
    """A prompt, which both answers share, and the answers with their end tokens."""

    prompt: tuple[int, ...]
    chosen: Answer
    rejected: Answer
    prompt_text: str
    location: str

    @property
    def num_tokens(self) -> int:
        """Those of a row: the prompt counts twice."""
        return 2 * len(self.prompt) + len(self.chosen) + len(self.rejected)


class PairEncoder:
    """Reads the formats of TRL: texts, messages, and messages whose prompt is what both answers begin with."""

    fields = Fields(("chosen", "rejected"), ("prompt", "tools"))

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None) -> None:
        """Raises `ArgumentError` for a template that is none, or that the tokenizer can't take."""
        if not isinstance(tokenizer, Tokenizer):
            raise ArgumentError("tokenizer", "must be a finished one", "write tokenizer: bytes, for one")
        is_chat = isinstance(tokenizer, ChatTokenizer)
        if chat_template is not None and not is_chat:
            raise ArgumentError("chat_template", "needs a tokenizer with special tokens", "name a pretrained one")
        self.tokenizer = tokenizer if chat_template is None else tokenizer.with_chat_template(chat_template)
        self._cutter = Cutter(tokenizer) if is_chat else None
        self._asked, self._conversation = chat_template, named_format("prompt_completion")
        self._marker: Marker | None = None

    @property
    def is_template_unused(self) -> bool:
        """Whether a template was given, and no row had messages."""
        return self._asked is not None and self._marker is None

    def encode(self, row: Row) -> TokenPair:
        """Raises `InputError` for what is no pair, with the row's place."""
        try:
            return self._encoded(row)
        except (RowError, CutError, TemplateError) as error:
            raise InputError(f"{row.location}: {error}") from error

    def _encoded(self, row: Row) -> TokenPair:
        for name in ("chosen", "rejected"):
            if row.fields.get(name) is None:
                raise RowError(name, f"is missing; the row has: {', '.join(map(str, row.fields)) or 'nothing'}")
        chosen, rejected = row.fields["chosen"], row.fields["rejected"]
        if chosen == rejected:
            raise RowError("rejected", "is the same as chosen, so there is nothing to prefer")
        prompt = row.fields.get("prompt")
        if prompt is None and isinstance(chosen, list) and isinstance(rejected, list):
            shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
            if shared is None:
                shorter = "chosen" if len(chosen) < len(rejected) else "rejected"
                raise RowError(shorter, "is what the other begins with, so it has no answer of its own")
            prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        if not prompt:
            raise RowError("prompt", "is missing or empty; an answer follows something")
        answers = {"chosen": chosen, "rejected": rejected}
        is_text = all(isinstance(one, str) for one in (prompt, chosen, rejected))
        side = self._text_side if is_text else partial(self._chat_side, row.fields.get("tools"))
        (text, first, one), (_, second, other) = (side(prompt, name, value) for name, value in answers.items())
        if first != second:
            raise RowError("prompt", "its tokens are not the same before both answers")
        return TokenPair(first, one, other, text, row.location)

    def _text_side(self, prompt: str, name: str, answer: str) -> tuple[str, tuple[int, ...], Answer]:
        if not answer.strip():
            raise RowError(name, "is empty")
        before: tuple[int, ...] = ()
        if self._cutter is not None:
            before = tuple(self.tokenizer.encode_batch([""])[0])
        if self._cutter is None:
            head, tail = self.tokenizer.encode_batch([prompt, answer])
        else:
            (placed,) = self._cutter.tokenizer.place([prompt + answer])
            tokens = self._cutter.cut(prompt + answer, [len(prompt)], placed)
            size = int((tokens.ends <= len(prompt)).sum())
            head, tail = tokens.ids[:size].tolist(), tokens.ids[size:].tolist()
        return prompt, (*before, *head), tuple((one, one) for one in [*tail, self.tokenizer.eos_id])

    def _chat_side(self, tools: Any, prompt: Any, name: str, answer: Any) -> tuple[str, tuple[int, ...], Answer]:
        marker, cutter = self._for_chats()
        try:
            fields = {"prompt": prompt, "completion": answer, "tools": tools}
            conversation = self._conversation(fields)
            turns = [one.for_template() for one in conversation.messages]
            num_before = len(prompt) if isinstance(prompt, list) else 1
            if others := [one for one in turns[num_before:] if one["role"] not in ("assistant", "tool")]:
                raise RowError(name, f"holds a turn of role {others[0]['role']!r}; an answer is the assistant's")
            answers = [number for number in range(num_before, len(turns)) if turns[number]["role"] == "assistant"]
            if not any(str(turns[one].get("content") or "").strip() or "tool_calls" in turns[one] for one in answers):
                raise RowError(name, "is empty")
            marked = marker.mark(conversation, turns, answers)
        except RowError as error:
            raise RowError(error.path.replace("completion", name), error.reason) from error
        (placed,) = cutter.tokenizer.place([marked.text])
        tokens = cutter.cut(marked.text, [one.boundary for one in marked.spans], placed)
        labels = np.full(len(tokens.ids), -100)
        for span in marked.spans:
            # Neither headers nor what tools say is generated.
            held = covered(tokens, span.begin, span.end)
            labels[held] = tokens.ids[held]
        size, end = int((tokens.ends <= marked.spans[0].boundary).sum()), int(np.flatnonzero(labels >= 0)[-1]) + 1
        before = marked.text[: marked.spans[0].boundary]
        pairs = zip(tokens.ids[size:end].tolist(), labels[size:end].tolist(), strict=True)
        return before, tuple(tokens.ids[:size].tolist()), tuple(pairs)

    def _for_chats(self) -> tuple[Marker, Cutter]:
        if self._cutter is None:
            hint = "write `tokenizer: {name: pretrained, path: …}`"
            raise ArgumentError("tokenizer", "messages need one with special tokens and a chat template", hint)
        if self._marker is None:
            self._marker = Marker(self.tokenizer.chat_template(), self.tokenizer.stop_tokens)
        return self._marker, self._cutter
