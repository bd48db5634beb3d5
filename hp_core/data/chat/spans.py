"""Where the answers of a conversation stand in its rendered text: by marks of the template, or by differences."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hp_core.data.chat.conversation import Conversation, RowError
from hp_core.data.chat.template import ChatTemplate, Rendering, TemplateError, Turn

_NO_STOP = (
    "the chat template closes this answer with no special token, so a model would never learn to stop; end assistant"
    " turns with `{{ eos_token }}`"
)


@dataclass(frozen=True)
class Span:
    """Characters `[begin, end)` that belong to one message: an answer with its stop token.

    `boundary` is where the prompt ends when the answer is generated: at `begin` or before it. `stops` is the end of
    the stop token, 0 where the span holds none: its message goes on, or is no answer.
    """

    message: int
    begin: int
    end: int
    boundary: int
    stops: int = 0


@dataclass(frozen=True)
class Marked:
    """The text of a conversation with the spans that were asked for, in order."""

    text: str
    spans: tuple[Span, ...]


class Marker:
    """Finds spans in what `template` renders. `stops` are the special tokens that may end an answer."""

    def __init__(self, template: ChatTemplate, stops: Iterable[str]) -> None:
        self.template = template
        one_stop = "|".join(re.escape(stop) for stop in sorted(stops, key=len, reverse=True)) or r"(?!)"
        self._closing = re.compile(rf"\s*(?:{one_stop})")
        self._closed = re.compile(rf"(?:{one_stop})\s*\Z")

    def mark(self, conversation: Conversation, turns: Sequence[Turn], answers: Sequence[int]) -> Marked:
        """The text of the conversation with the spans of the `answers`, which are numbers of messages.

        `turns` are its messages as the template is given them. Where an answer is closed by the mark of the next
        turn, the text of a conversation that ends with an answer is extended by that mark. Raises `RowError` where a
        span can't be told for sure.
        """
        work = _Work(self, conversation, turns)
        found = work.marked_answers(answers) if work.marks is not None else work.differing_answers(answers)
        spans = tuple(work.closed(one) for one in found)
        return Marked(work.text, spans)

    def content(self, conversation: Conversation, turns: Sequence[Turn], message: int) -> Span:
        """What the template makes of the message, whatever its role, and nothing else. Raises `RowError`."""
        work = _Work(self, conversation, turns)
        parts = work.around([message])
        if parts is None or (found := between(work.text, parts)) is None:
            raise work.fault(message, "the chat template changes the rest of the conversation with this turn")
        begin, end = found[0]
        return Span(message, begin, end, begin)

    def closing(self, text: str, position: int) -> int | None:
        """The end of the stop token that follows the position, with nothing but blanks between; None without one."""
        match = self._closing.match(text, position)
        return None if match is None else match.end()

    def closed_at(self, text: str, begin: int, end: int) -> int | None:
        """The end of the stop token with which the characters end, but for blanks; None without one."""
        match = self._closed.search(text[begin:end])
        return None if match is None else begin + len(match.group().rstrip()) + match.start()


@dataclass(frozen=True)
class _Open:
    """An answer whose stop token is still to be looked for, unless `is_closed`."""

    message: int
    begin: int
    end: int
    boundary: int
    is_last: bool = True
    is_closed: bool = False


class _Work:
    """One conversation. Nothing is searched for in its text but what the template put there."""

    def __init__(self, marker: Marker, conversation: Conversation, turns: Sequence[Turn]) -> None:
        self.marker = marker
        self.conversation = conversation
        self.turns = turns
        rendering = self.render(turns)
        self.text, self.marks = rendering
        self._prompts: dict[int, int | None] = {}
        self.salt = 0
        while f"Zq{self.salt}k" in self.text:
            self.salt += 1

    def fault(self, message: int, reason: str) -> RowError:
        return RowError(self.conversation.messages[message].path, reason)

    def render(self, turns: Sequence[Turn], add_generation_prompt: bool = False) -> Rendering:
        try:
            return self.marker.template.render(
                turns, self.conversation.tools, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            path = self.conversation.messages[0].path.partition("[")[0]
            raise RowError(path, f"the chat template refuses the conversation: {error}") from error

    def prompt(self, message: int) -> int | None:
        """The length of the prompt that the answer is generated from, if the text begins with it."""
        if message not in self._prompts:
            try:
                prompt = self.render(self.turns[:message], add_generation_prompt=True).text
            except RowError:
                self._prompts[message] = None
            else:
                self._prompts[message] = len(prompt) if self.text.startswith(prompt) else None
        return self._prompts[message]

    def marked_answers(self, answers: Sequence[int]) -> list[_Open]:
        """The generation marks of the answers; a template may set several for one."""
        assert self.marks is not None
        all_answers = [number for number, turn in enumerate(self.turns) if turn["role"] == "assistant"]
        prompts = {message: self.prompt(message) for message in all_answers}
        known = [prompt for prompt in prompts.values() if prompt is not None]
        if len(known) == len(prompts) and known == sorted(known):
            if any(begin < known[0] for begin, _ in self.marks):
                raise self.fault(all_answers[0], "the chat template sets a generation mark before the first answer")
            owners = [all_answers[bisect_right(known, begin) - 1] for begin, _ in self.marks]
        else:
            owners = self._owners(all_answers)
        if missing := [message for message in answers if message not in owners]:
            raise self.fault(missing[0], "the chat template sets no generation mark for this answer")
        found: list[_Open] = []
        for number, (owner, (begin, end)) in enumerate(zip(owners, self.marks, strict=True)):
            if owner not in answers:
                continue
            is_first = number == 0 or owners[number - 1] != owner
            is_last = number + 1 == len(owners) or owners[number + 1] != owner
            prompt = prompts[owner]
            boundary = prompt if is_first and prompt is not None and prompt <= begin else begin
            found.append(_Open(owner, begin, end, boundary, is_last, is_last and self._holds_stop(number, owner)))
        return found

    def _holds_stop(self, number: int, message: int) -> bool:
        """Whether a mark holds the stop token, rather than an answer that spells one at its end."""
        assert self.marks is not None
        text, marks = self.text, self.marks
        if self.marker.closed_at(text, *marks[number]) is None:
            return False
        content = self.turns[message].get("content") or ""
        if self.marker.closed_at(content, 0, len(content)) is None:
            return True
        turns = [*self.turns]
        turns[message] = {**turns[message], "content": "Zq"}
        text, other_marks = self.render(turns)
        if other_marks is None or len(other_marks) != len(marks):
            raise self.fault(message, "it can't be told whether the chat template's generation mark holds a stop token")
        return self.marker.closed_at(text, *other_marks[number]) is not None

    def _owners(self, all_answers: Sequence[int]) -> list[int]:
        """Whose mark each is, by how many there are in the conversation up to each answer."""
        assert self.marks is not None
        owners: list[int] = []
        for message in all_answers:
            so_far = self.render(self.turns[: message + 1]).marks or ()
            if so_far != self.marks[: len(so_far)] or len(so_far) < len(owners):
                raise self.fault(
                    message, "it can't be told which generation marks of the chat template are this turn's"
                )
            owners += [message] * (len(so_far) - len(owners))
        if len(owners) != len(self.marks):
            raise self.fault(all_answers[-1], "the chat template sets generation marks behind the last answer")
        return owners

    def differing_answers(self, answers: Sequence[int]) -> list[_Open]:
        """What changes when the answers are others: all at once where that is unambiguous, else one by one."""
        if not answers:
            return []
        plain = [self._plain_answer(message) for message in answers]
        if all(plain):
            return [one for one in plain if one is not None]
        parts = self.around(answers)
        found = None if parts is None else between(self.text, parts)
        if found is None:
            return [self._one_answer(message) for message in answers]
        opened: list[_Open] = []
        for message, (begin, end) in zip(answers, found, strict=True):
            prompt = self.prompt(message)
            if prompt is None or prompt > end:
                prompt = begin
            opened.append(_Open(message, max(begin, prompt), end, prompt))
        return opened

    def _plain_answer(self, message: int) -> _Open | None:
        """An answer that stands right behind its prompt as it is in the row, with its stop token behind it.

        This spares a rendering, and finds the same: had the template set a text between the two, the text and the
        answer together would be the answer and blanks, and so the text and the answer nothing but blanks.
        """
        turn = self.turns[message]
        content = turn.get("content")
        if not content or content != content.strip() or len(turn) > 2:
            return None
        prompt = self.prompt(message)
        if prompt is None or not self.text.startswith(content, prompt):
            return None
        end = prompt + len(content)
        return _Open(message, prompt, end, prompt) if self.marker.closing(self.text, end) is not None else None

    def _one_answer(self, message: int) -> _Open:
        """An answer that is rendered apart from the others, or with more than its content."""
        parts = self.around([message])
        if parts is None and not {"tool_calls", "reasoning_content"} & set(self.turns[message]):
            raise self.fault(message, "the chat template doesn't show the content of this answer once and unchanged")
        prompt = self.prompt(message)
        begin = end = None
        if parts is not None:
            found = between(self.text, parts)
            if found is not None:
                begin, end = found[0]
            else:
                begin = len(parts[0]) if self.text.startswith(parts[0]) else None
                end = len(self.text) - len(parts[1]) if self.text.endswith(parts[1]) else None
        if begin is None:
            begin = prompt
        if begin is None:
            raise self.fault(message, "the chat template renders the turns before this answer in another way with it")
        is_closed = False
        if end is None or end < begin:
            end, is_closed = self._turn_end(message, begin)
        if prompt is None or prompt > end:
            prompt = begin
        return _Open(message, max(begin, prompt), end, prompt, is_closed=is_closed)

    def _turn_end(self, message: int, begin: int) -> tuple[int, bool]:
        """Where the turn ends by the text of the conversation up to it, and whether with a stop token."""
        end = len(self.text)
        if message + 1 < len(self.turns):
            so_far = self.render(self.turns[: message + 1]).text
            if not self.text.startswith(so_far) or len(so_far) < begin:
                raise self.fault(
                    message, "the chat template renders this answer in another way without the turns behind"
                )
            end = len(so_far)
        closed = self.marker.closed_at(self.text, begin, end)
        if closed is not None:
            return closed, True
        return begin + len(self.text[begin:end].rstrip()), False

    def closed(self, found: _Open) -> Span:
        """The answer with its stop token."""
        if not found.is_last:
            return Span(found.message, found.begin, found.end, found.boundary)
        if found.is_closed:
            stops = self.marker.closed_at(self.text, found.begin, found.end) or found.end
            return Span(found.message, found.begin, found.end, found.boundary, stops)
        stops = self.marker.closing(self.text, found.end) or self._close_last(found)
        return Span(found.message, found.begin, stops, found.boundary, stops)

    def _close_last(self, found: _Open) -> int:
        """Extend the text by the mark of a next turn, which is what stops the answers before."""
        is_last_turn = found.message + 1 == len(self.turns)
        if not is_last_turn or self.text[found.end :].strip():
            raise self.fault(found.message, _NO_STOP)
        try:
            longer = self.render([*self.turns, {"role": "user", "content": "Zq"}]).text
        except RowError as error:
            raise self.fault(found.message, _NO_STOP) from error
        end = self.marker.closing(longer, found.end)
        if end is None or not longer.startswith(self.text[: found.end]):
            raise self.fault(found.message, _NO_STOP)
        self.text = longer[:end]
        return end

    def around(self, messages: Sequence[int]) -> list[str] | None:
        """The texts before, between and behind the messages, from a rendering with others in their place.

        None if the template doesn't render each of these exactly once and in order.
        """
        turns: list[Any] = list(self.turns)
        sentinels = [f"Zq{self.salt}k{number}w" for number in range(len(messages))]
        for message, sentinel in zip(messages, sentinels, strict=True):
            turn = turns[message]
            is_answer = turn["role"] == "assistant"
            turns[message] = {**({"role": "assistant"} if is_answer else turn), "content": sentinel}
        try:
            rest = self.render(turns).text
        except RowError:
            return None
        parts: list[str] = []
        for sentinel in sentinels:
            before, found, rest = rest.partition(sentinel)
            if not found:
                return None
            parts.append(before)
        parts.append(rest)
        return None if any(f"Zq{self.salt}k" in part for part in parts) else parts


def between(text: str, parts: Sequence[str]) -> list[tuple[int, int]] | None:
    """The places in `text` that the `parts` leave, if it is made of them in order in one way only; else None."""
    low, high = len(parts[0]), len(text) - len(parts[-1])
    if low > high or not text.startswith(parts[0]) or not text.endswith(parts[-1]):
        return None
    first: list[tuple[int, int]] = []
    begin = low
    for part in parts[1:-1]:
        place = text.find(part, begin, high)
        if place < 0:
            return None
        first.append((begin, place))
        begin = place + len(part)
    first.append((begin, high))
    end = high
    for (_, place), part in zip(reversed(first[:-1]), reversed(parts[1:-1]), strict=True):
        # The last place that each part could have; where it isn't the first one too, there is a choice.
        if text.rfind(part, low, end) != place:
            return None
        end = place
    return first
