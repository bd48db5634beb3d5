"""A row of text or messages as the tokens of a prompt and of two answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_core import ArgumentError, InputError, Tokenizer
from hp_core.data.chat.conversation import RowError
from hp_core.data.chat.formats import named_format
from hp_core.data.chat.template import ChatTokenizer, TemplateError
from hp_core.data.chat.tokens import CutError, Cutter
from hp_core.data.records import Fields, Row


@dataclass(frozen=True)
class TokenPair:
    """A prompt, which both answers share, and the answers with their end tokens."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
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
        self._asked, self._template, self._conversation = chat_template, None, named_format("prompt_completion")

    @property
    def is_template_unused(self) -> bool:
        """Whether a template was given, and no row had messages."""
        return self._asked is not None and self._template is None

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
            shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), 0)
            prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        if not prompt:
            raise RowError("prompt", "is missing or empty; an answer follows something")
        answers = {"chosen": chosen, "rejected": rejected}
        is_text = all(isinstance(one, str) for one in (prompt, chosen, rejected))
        side = self._text_side if is_text else self._chat_side
        (text, first, one), (_, second, other) = (side(row, prompt, name, value) for name, value in answers.items())
        if first != second:
            raise RowError("prompt", "its tokens are not the same before both answers")
        return TokenPair(first, one, other, text, row.location)

    def _text_side(self, row: Row, prompt: str, name: str, answer: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        del row
        if not answer.strip():
            raise RowError(name, "is empty")
        before: tuple[int, ...] = ()
        if self._cutter is not None:
            before = tuple(self.tokenizer.encode_batch([""])[0])
        head, tail = self._cut(prompt, prompt + answer)
        return prompt, (*before, *head), (*tail, self.tokenizer.eos_id)

    def _chat_side(self, row: Row, prompt: Any, name: str, answer: Any) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        template = self._chat_template()
        try:
            fields = {"prompt": prompt, "completion": answer, "tools": row.fields.get("tools")}
            conversation = self._conversation(fields)
        except RowError as error:
            raise RowError(error.path.replace("completion", name), error.reason) from error
        turns = [one.for_template() for one in conversation.messages]
        num_before = len(prompt) if isinstance(prompt, list) else 1
        if others := [one for one in turns[num_before:] if one["role"] not in ("assistant", "tool")]:
            raise RowError(name, f"holds a turn of role {others[0]['role']!r}; an answer is the assistant's")
        if not any(str(one.get("content") or "").strip() or "tool_calls" in one for one in turns[num_before:]):
            raise RowError(name, "is empty")
        before = template.render(turns[:num_before], conversation.tools, add_generation_prompt=True).text
        whole = template.render(turns, conversation.tools).text
        if not whole.startswith(before):
            raise RowError(name, "the chat template writes the prompt otherwise when an answer follows it")
        head, tail = self._cut(before, whole)
        stops = np.flatnonzero(np.isin(tail, list(self.tokenizer.stop_tokens.values())))
        # What a template writes behind the end of an answer is never generated.
        tail = tail[: stops[-1] + 1] if len(stops) else (*tail, self.tokenizer.eos_id)
        return before, head, tail

    def _chat_template(self) -> Any:
        if self._cutter is None:
            hint = "write `tokenizer: {name: pretrained, path: …}`"
            raise ArgumentError("tokenizer", "messages need one with special tokens and a chat template", hint)
        if self._template is None:
            self._template = self.tokenizer.chat_template()
        return self._template

    def _cut(self, before: str, whole: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens of a text in two parts, none of them across the border."""
        if self._cutter is None:
            head, tail = self.tokenizer.encode_batch([before, whole[len(before) :]])
            return tuple(head), tuple(tail)
        (placed,) = self._cutter.tokenizer.place([whole])
        tokens = self._cutter.cut(whole, [len(before)], placed)
        is_head = tokens.ends <= len(before)
        return tuple(tokens.ids[is_head].tolist()), tuple(tokens.ids[~is_head].tolist())
