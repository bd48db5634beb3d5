"""Rows of conversations as tokens, of which the answers and their stop tokens are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from hp_core.data.chat.abilities import Abilities
from hp_core.data.chat.conversation import Conversation, Message, RowError
from hp_core.data.chat.formats import ConversationFormat
from hp_core.data.chat.spans import Marked, Marker, Span
from hp_core.data.chat.template import ChatTemplate, ChatTokenizer, PlacedTokens
from hp_core.data.chat.tokens import CutError, Cutter, covered
from hp_core.data.columns import RowColumns
from hp_core.data.fingerprint import document_hash, fingerprint
from hp_core.data.images.placing import COLUMNS, ImageReader, PlacedImage, expanded
from hp_core.data.images.protocol import ImageTokenizer
from hp_core.data.images.references import ImageRules
from hp_core.data.images.template import template_of_images
from hp_core.data.protocols import Tokenizer, TrainableTokenizer
from hp_core.data.records import Encoded, Fields, Row
from hp_core.errors import ArgumentError, InputError

TrainOn = Literal["assistant", "last", "all"]

_RULE_VERSION = 2


@dataclass(frozen=True)
class ChatSettings:
    """What a recipe says of its conversations.

    `train_on` is every answer, the last one only, or everything. With `has_weights`, turns may have weights of their
    own. `template`, `arguments` and `date` are as for `ChatTokenizer.chat_template`. `images` says where images are,
    for a tokenizer that takes them.
    """

    format: ConversationFormat
    train_on: TrainOn = "assistant"
    has_weights: bool = False
    template: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None
    numbers: RowColumns = field(default_factory=RowColumns)
    images: ImageRules = field(default_factory=ImageRules)


@dataclass(frozen=True)
class _Read:
    """A row that is rendered: its text with spans, what its tokens count for by default, and what else it has."""

    marked: Marked
    weights: Mapping[int, float]
    everything: bool
    split_hash: int
    values: tuple[float, ...]
    path: str
    images: tuple[PlacedImage, ...] = ()
    places: tuple[Span, ...] = ()


class ChatEncoder:
    """Renders conversations and masks their tokens. Pickled to the processes that encode."""

    def __init__(self, tokenizer: ChatTokenizer, template: ChatTemplate, settings: ChatSettings) -> None:
        """Raises `ArgumentError` for a template whose answers can't be told from the rest."""
        self.tokenizer = tokenizer
        self._images: ImageReader | None = None
        if isinstance(tokenizer, ImageTokenizer):
            self._images = ImageReader(tokenizer, settings.images)
            template = template_of_images(template, tokenizer.image_token)
        self.template = template
        self.settings = settings
        self._marker = Marker(template, tokenizer.stop_tokens)
        self._cutter = Cutter(tokenizer)
        self._abilities = Abilities.of(template)
        self._stop_ids = np.array(sorted(set(tokenizer.stop_tokens.values())), dtype=np.int64)
        self._probe()

    @classmethod
    def of(cls, settings: ChatSettings, tokenizer: Tokenizer | TrainableTokenizer) -> ChatEncoder:
        """The encoder for the tokenizer of a run. Raises `ArgumentError` for one that knows no chats."""
        if not isinstance(tokenizer, ChatTokenizer):
            raise ArgumentError(
                "tokenizer",
                f"chats need a finished tokenizer with special tokens, and {type(tokenizer).__name__} is none",
                "write `tokenizer: {name: pretrained, path: …}`",
            )
        template = tokenizer.chat_template(settings.template, arguments=settings.arguments, date=settings.date)
        return cls(tokenizer, template, settings)

    @cached_property
    def fingerprint(self) -> str:
        """Depends on the tokenizer, the template with its arguments, the format and what is trained."""
        settings = self.settings
        return fingerprint(
            "chat",
            _RULE_VERSION,
            self.tokenizer.fingerprint,
            self.template.fingerprint,
            settings.format.identity,
            settings.train_on,
            settings.has_weights,
            "columns",
            *settings.numbers.names,
            *(() if self._images is None else ("images 2", *self._images.identity)),
        )

    @property
    def location(self) -> str:
        """Where images lie that rows name by relative paths."""
        return "" if self._images is None else str(self._images.rules.directory or "")

    @property
    def fields(self) -> Fields:
        """Those of the format and of the columns."""
        of_format = self.settings.format.fields
        # Also for a tokenizer that takes no images, so that none is left out in silence.
        return Fields((*of_format.required, *self.settings.numbers.names), (*of_format.optional, *COLUMNS))

    @property
    def columns(self) -> tuple[str, ...]:
        """The numbers' names."""
        return self.settings.numbers.names

    @property
    def has_mask(self) -> bool:
        """Prompts are not trained, or some turn may say that it isn't."""
        return True

    @property
    def has_weights(self) -> bool:
        """Whether turns may have weights."""
        return self.settings.has_weights

    @property
    def has_images(self) -> bool:
        """Whether turns may have images."""
        return self._images is not None

    def encode(self, rows: Sequence[Row]) -> list[Encoded | InputError]:
        """Each row as tokens with their mask, or what is wrong with it."""
        read = [self._read(row) for row in rows]
        tokens = iter(self.tokenizer.place([one.marked.text for one in read if isinstance(one, _Read)]))
        encoded: list[Encoded | InputError] = []
        for row, one in zip(rows, read, strict=True):
            if isinstance(one, InputError):
                encoded.append(one)
                continue
            try:
                encoded.append(self._masked(one, next(tokens)))
            except RowError as error:
                encoded.append(_at(row, error))
        return encoded

    def _read(self, row: Row) -> _Read | InputError:
        try:
            conversation, images = self._placed(row)
            weights = turn_weights(conversation, self.settings)
            own = b"".join(one.digest.to_bytes(8, "little") for one in images)
            content = row.group.encode() if row.group else conversation.content_bytes() + own
            marked = self._mark(conversation, weights)
            values = self.settings.numbers(row)
            path = conversation.messages[-1].path
            marked, places = self._expanded(marked, images, conversation)
        except RowError as error:
            return _at(row, error)
        except InputError as error:
            return error
        except RecursionError:
            return InputError(f"{row.location}: the row is nested too deep")
        everything = self.settings.train_on == "all"
        return _Read(marked, weights, everything, document_hash(content), values, path, images, places)

    def _placed(self, row: Row) -> tuple[Conversation, tuple[PlacedImage, ...]]:
        """The conversation of a row, and its images."""
        conversation = self.settings.format(row.fields)
        if self._images is not None:
            return self._images.placed(conversation, row.fields)
        held = [*(one.path for one in conversation.images), *(name for name in COLUMNS if row.fields.get(name))]
        if held:
            hint = "write `tokenizer: {name: processor, path: …}` and `trainer: vlm`"
            raise RowError(held[0], f"is an image, which the tokenizer knows nothing of; {hint}")
        return conversation, ()

    def _expanded(
        self, marked: Marked, images: Sequence[PlacedImage], conversation: Conversation
    ) -> tuple[Marked, tuple[Span, ...]]:
        """The text with what stands for the images in it."""
        if self._images is None:
            return marked, ()
        return expanded(marked, images, self._images.tokenizer.image_token, conversation.messages[0].path)

    def _mark(self, conversation: Conversation, weights: Mapping[int, float]) -> Marked:
        """The text with the spans of the turns that are trained; where all are, of the answers and special turns."""
        turns = self._abilities.turns(conversation)
        messages = conversation.messages
        answers = [number for number, one in enumerate(messages) if one.role == "assistant"]
        if self.settings.train_on != "all":
            answers = [number for number in answers if weights[number]]
        marked = self._marker.mark(conversation, turns, answers)
        for one in messages:
            if "tool_calls" in one.extras and one.content and one.content.strip() not in marked.text:
                raise RowError(f"{one.path}.content", "the chat template leaves it out beside the tool calls")
        if self.settings.train_on != "all":
            return marked
        others = [number for number, one in enumerate(messages) if one.role != "assistant" and weights[number] != 1]
        contents = [self._marker.content(conversation, turns, number) for number in others]
        return Marked(marked.text, (*marked.spans, *contents))

    def _masked(self, read: _Read, whole: PlacedTokens) -> Encoded:
        marked = read.marked
        try:
            tokens = self._cutter.cut(marked.text, [span.boundary for span in marked.spans], whole)
        except CutError as error:
            raise RowError(read.path, str(error)) from error
        weights = np.full(len(tokens.ids), float(read.everything), dtype=np.float32)
        for number, span in enumerate(marked.spans):
            held = covered(tokens, span.begin, span.end)
            if (
                span.stops
                and not np.isin(tokens.ids[covered(tokens, span.stops - 1, span.stops)], self._stop_ids).any()
            ):
                raise RowError(read.path, f"the stop token of answer {number + 1} is no token of its own")
            weights[held] = read.weights[span.message]
        images = () if self._images is None else self._images.encoded(tokens, read.images, read.places, read.path)
        for one in images:
            # What stands for an image is given, and nobody says it.
            weights[one.start : one.start + one.size] = 0
        return Encoded(
            tokens.ids,
            read.split_hash,
            trained=weights > 0,
            weights=weights if self.settings.has_weights else None,
            values=read.values,
            images=images,
        )

    def _probe(self) -> None:
        """Mask a conversation before any row is read, so that a template that can't be masked is told once."""
        turns = [
            ("user", "What is it?"),
            ("assistant", "It is this."),
            ("user", "And now?"),
            ("assistant", "It is this."),
        ]
        messages = [Message(role, content, f"messages[{number}]") for number, (role, content) in enumerate(turns)]
        reasons: list[str] = []
        for first in ([], [Message("system", "Answer.", "messages[0]")]):
            conversation = Conversation((*first, *messages))
            weights = {number: float(one.role == "assistant") for number, one in enumerate(conversation.messages)}
            try:
                marked = self._marker.mark(conversation, self._abilities.turns(conversation), _answers(conversation))
                if marked.text.count(turns[1][1]) != 2:
                    raise RowError("messages[1]", "it doesn't show the content of answers once and unchanged")
                self._require_marks_of_answers(conversation)
                (tokens,) = self.tokenizer.place([marked.text])
                self._masked(_Read(marked, weights, False, 0, (), "messages"), tokens)
                return
            except RowError as error:
                reasons.append(error.reason)
        raise ArgumentError(
            "chat_template", f"the chat template of {self.tokenizer.name!r} can't be masked: {reasons[0]}"
        )

    def _require_marks_of_answers(self, conversation: Conversation) -> None:
        text, marks = self.template.render(self._abilities.turns(conversation), conversation.tools)
        others = [one.content for one in conversation.messages if one.role != "assistant"]
        for begin, end in marks or ():
            if any(content and content in text[begin:end] for content in others):
                raise RowError("messages", "it sets generation marks around turns that are no answers")


def turn_weights(conversation: Conversation, settings: ChatSettings) -> dict[int, float]:
    """What each token of each turn counts for as a target; 0 where it is none.

    Raises `RowError` for what a row says of a turn's training without effect.
    """
    last = _answers(conversation)[-1]
    weights: dict[int, float] = {}
    for number, message in enumerate(conversation.messages):
        is_candidate = settings.train_on == "all" or (
            message.role == "assistant" and (settings.train_on == "assistant" or number == last)
        )
        _check_turn(message, settings)
        weights[number] = message.weight if is_candidate and message.train is not False else 0.0
    return weights


def _check_turn(message: Message, settings: ChatSettings) -> None:
    if settings.train_on != "all" and message.role != "assistant":
        if message.train:
            raise RowError(message.path, f"asks to train a turn of role {message.role!r}; that needs train_on: all")
        if message.weight not in (0, 1):
            raise RowError(message.path, f"gives a turn of role {message.role!r} a weight; that needs train_on: all")
    if message.train and message.weight == 0:
        raise RowError(message.path, "asks to train the turn with weight 0")
    if message.weight not in (0, 1) and not settings.has_weights:
        raise RowError(message.path, f"has the weight {message.weight:g}; weights need token_weights: true")


def _answers(conversation: Conversation) -> list[int]:
    return [number for number, one in enumerate(conversation.messages) if one.role == "assistant"]


def _at(row: Row, error: RowError) -> InputError:
    return InputError(f"{row.location}: {error.path}: {error.reason}")
