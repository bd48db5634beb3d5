"""The images of a conversation, in the places where its turns refer to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from hp_core.data.chat.conversation import Conversation, ImagePart, Message, Part, RowError
from hp_core.data.chat.spans import Marked, Span
from hp_core.data.chat.template import PlacedTokens, ReservesTokens, reserved_fault
from hp_core.data.chat.tokens import covered
from hp_core.data.images.protocol import ImageTokenizer
from hp_core.data.images.references import ImageError, ImageRules, ImageSource, decoded, source_of

# How a text refers to the next of its row's images, where the row has a column of them.
MARK = "<image>"
COLUMNS = ("images", "image")


@dataclass(frozen=True)
class PlacedImage:
    """An image of a row: where it comes from, what stands for it in the text, and how many pixels the model sees."""

    source: ImageSource
    digest: int
    text: str
    pixels: int
    path: str


@dataclass(frozen=True)
class EncodedImage:
    """An image of one document, and the tokens `[start, start + size)` that stand for it."""

    image: PlacedImage
    start: int
    size: int


@dataclass(frozen=True)
class ImageReader:
    """Finds the images of rows. Pickled to the processes that encode."""

    tokenizer: ImageTokenizer
    rules: ImageRules

    @property
    def identity(self) -> tuple[str, ...]:
        """What changes the images of the same rows, for a fingerprint."""
        return (self.tokenizer.image_fingerprint, *self._reserved)

    def encoded(
        self, tokens: PlacedTokens, images: Sequence[PlacedImage], places: Sequence[Span], path: str
    ) -> tuple[EncodedImage, ...]:
        """The tokens of each image. Raises `RowError` where others stand for an image, too."""
        found: list[EncodedImage] = []
        is_image = tokens.ids == self.tokenizer.image_token_id
        for image, place in zip(images, places, strict=True):
            (own,) = np.nonzero(covered(tokens, place.begin, place.end))
            found.append(EncodedImage(image, int(own[0]), len(own)))
            is_image[own] = False
        if is_image.any():
            raise RowError(path, f"{int(is_image.sum())} tokens stand for images that the row doesn't have")
        return tuple(found)

    def placed(
        self, conversation: Conversation, fields: Mapping[str, Any]
    ) -> tuple[Conversation, tuple[PlacedImage, ...]]:
        """The conversation with its marks as images, and these in order.

        Raises `RowError` for an image that can't be used, one that no turn refers to, and one too few.
        """
        filled = [name for name in COLUMNS if fields.get(name) is not None]
        if len(filled) > 1:
            raise RowError(filled[1], f"the row has images in {filled[0]!r}, too; leave one of them out, or null")
        column = filled[0] if filled else None
        own = [] if column is None else _listed(fields[column])
        # A column without an image is one too few: its marks are no text to train on.
        messages = [one if column is None else _with_marks(one) for one in conversation.messages]
        conversation = replace(conversation, messages=tuple(messages))
        self._refuse(conversation)
        found: list[PlacedImage] = []
        taken = 0
        for part in conversation.images:
            value, place = part.value, part
            if value is None:
                if taken == len(own):
                    has = f"has {len(own)} in {column!r}" if column else f"has no column {' or '.join(COLUMNS)}"
                    raise RowError(part.path, f"is image {taken + 1} of the row's own, and the row {has}")
                value, place = own[taken], ImagePart(None, f"{column}[{taken}]")
                taken += 1
            found.append(self._read(place, value))
        if taken < len(own):
            hint = f"write {{type: image}} or {MARK} where it belongs"
            raise RowError(f"{column}[{taken}]", f"no turn refers to it: {len(own)} images, {taken} places; {hint}")
        return conversation, tuple(found)

    @cached_property
    def _reserved(self) -> tuple[str, ...]:
        own = self.tokenizer
        return own.reserved_tokens if isinstance(own, ReservesTokens) else (own.image_token,)

    def _refuse(self, conversation: Conversation) -> None:
        """Raise `RowError` for texts that the model would take for an image or a video."""
        texts = [(f"{one.path}.content", one.content) for one in conversation.messages]
        texts += [(f"{one.path}.{key}", value) for one in conversation.messages for key, value in one.extras.items()]
        for path, value in (*texts, ("tools", conversation.tools)):
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            if (fault := reserved_fault(text, self._reserved)) is not None:
                raise RowError(path, fault)

    def _read(self, part: ImagePart, value: Any) -> PlacedImage:
        source = source_of(part, value, self.rules)
        try:
            data = source.read()
            inputs = self.tokenizer.image_inputs(decoded(data, source.name))
        except ImageError as error:
            raise RowError(part.path, str(error)) from error
        except ValueError as error:
            raise RowError(part.path, f"{source.name}: {' '.join(str(error).split())}") from error
        return PlacedImage(
            source,
            xxhash.xxh3_64_intdigest(data),
            self.tokenizer.image_text(inputs),
            self.tokenizer.image_pixels(inputs),
            part.path,
        )


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _with_marks(message: Message) -> Message:
    """The message with each mark in its texts as an image of the row's own."""
    if message.content is None or MARK not in message.content or message.role == "assistant":
        return message
    parts: list[Part] = []
    for part in message.parts or (message.content,):
        if not isinstance(part, str):
            parts.append(part)
            continue
        first, *rest = part.split(MARK)
        parts += [first] if first else []
        for text in rest:
            parts.append(ImagePart(None, f"{message.path}: {MARK}"))
            parts += [text] if text else []
    text = "".join(part for part in parts if isinstance(part, str))
    return replace(message, content=text, parts=tuple(parts))


def expanded(marked: Marked, images: Sequence[PlacedImage], token: str, path: str) -> tuple[Marked, tuple[Span, ...]]:
    """The text with what stands for each image in the place of its token, and where that is.

    Raises `RowError` where the text hasn't one token for each image.
    """
    pieces = marked.text.split(token)
    if len(pieces) != len(images) + 1:
        message = f"the chat template writes {len(pieces) - 1} times {token!r} for {len(images)} images"
        raise RowError(path, message)
    if not images:
        return marked, ()
    places: list[Span] = []
    text = pieces[0]
    # Where the text so far stood before, and how much longer it is now.
    shifts: list[tuple[int, int]] = []
    before = len(pieces[0])
    for number, (image, piece) in enumerate(zip(images, pieces[1:], strict=True)):
        places.append(Span(number, len(text), len(text) + len(image.text), len(text)))
        text += image.text + piece
        before += len(token)
        shifts.append((before, len(text) - len(piece) - before))
        before += len(piece)

    def moved(position: int) -> int:
        return position + next((shift for end, shift in reversed(shifts) if position >= end), 0)

    spans = tuple(
        replace(
            one,
            begin=moved(one.begin),
            end=moved(one.end),
            boundary=moved(one.boundary),
            stops=moved(one.stops) if one.stops else 0,
        )
        for one in marked.spans
    )
    return Marked(text, spans), tuple(places)
