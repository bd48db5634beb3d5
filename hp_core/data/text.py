"""Plain text as documents: every token is a target, and the end token closes each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hp_core.data.chat.template import ReservesTokens, reserved_fault
from hp_core.data.columns import RowColumns
from hp_core.data.fields import RowText
from hp_core.data.fingerprint import document_hash, fingerprint
from hp_core.data.protocols import Tokenizer
from hp_core.data.records import Encoded, Row
from hp_core.errors import InputError


@dataclass(frozen=True)
class TextEncoder:
    """A row's text as the tokenizer encodes it, then EOS unless it ends with one; no tokens for an empty text.

    A text that spells a token of images or videos is a fault.
    `numbers` become the document's columns. Documents with the same group, or without one with the same text, are
    held out together.
    """

    tokenizer: Tokenizer
    text: RowText
    numbers: RowColumns = field(default_factory=RowColumns)

    @cached_property
    def fingerprint(self) -> str:
        """Depends on the tokenizer, the rule for the text, and the columns' names."""
        reserved = ("reserved", *self._reserved) if self._reserved else ()
        return fingerprint(
            "text", self.tokenizer.fingerprint, *self.text.identity, "columns", *self.numbers.names, *reserved
        )

    @cached_property
    def _reserved(self) -> tuple[str, ...]:
        return self.tokenizer.reserved_tokens if isinstance(self.tokenizer, ReservesTokens) else ()

    @property
    def location(self) -> str:
        """All that it reads is in the rows."""
        return ""

    @property
    def fields(self) -> tuple[str, ...]:
        """Those of the text and of the columns."""
        return (*self.text.fields, *self.numbers.names)

    @property
    def columns(self) -> tuple[str, ...]:
        """The numbers' names."""
        return self.numbers.names

    @property
    def has_mask(self) -> bool:
        """Every token is trained."""
        return False

    @property
    def has_images(self) -> bool:
        """It has none."""
        return False

    @property
    def has_weights(self) -> bool:
        """Every token counts for 1."""
        return False

    def encode(self, rows: Sequence[Row]) -> list[Encoded | InputError]:
        """Each row as tokens, or what is wrong with it.

        Raises `InputError` for a tokenizer that gives ids it doesn't declare.
        """
        read = [self._read(row) for row in rows]
        texts = [one[0] for one in read if not isinstance(one, InputError) and one[0]]
        closed_texts = [closed(ids, self.tokenizer.eos_id) for ids in self.tokenizer.encode_batch(texts)]
        require_declared_ids(closed_texts, self.tokenizer)
        ids = iter(closed_texts)
        encoded: list[Encoded | InputError] = []
        for one in read:
            if isinstance(one, InputError):
                encoded.append(one)
                continue
            text, content_hash, values = one
            encoded.append(Encoded(next(ids) if text else np.zeros(0, dtype=np.int64), content_hash, values=values))
        return encoded

    def _read(self, row: Row) -> tuple[str, int, tuple[float, ...]] | InputError:
        try:
            text = self.text(row)
            if (fault := reserved_fault(text, self._reserved)) is not None:
                raise InputError(f"{row.location}: {fault}")
            return text, split_hash(row, text), self.numbers(row)
        except InputError as error:
            return error


def split_hash(row: Row, text: str) -> int:
    """What a validation split goes by. Raises `InputError` as `utf8` does."""
    content = utf8(row, text)
    return document_hash(row.group.encode() if row.group else content)


def utf8(row: Row, text: str) -> bytes:
    """The row's text as UTF-8. Raises `InputError` for half a surrogate pair, which JSON can smuggle in."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        character = text[error.start]
        raise InputError(
            f"{row.location}: character {error.start + 1} of the text is {character!a}, half of a surrogate pair"
        ) from error


def closed(ids: Sequence[int], eos_id: int) -> NDArray[np.int64]:
    """The ids with EOS at the end, unless it is there."""
    return np.asarray(ids if ids and ids[-1] == eos_id else [*ids, eos_id], dtype=np.int64)


def require_declared_ids(documents: Sequence[NDArray[np.int64]], tokenizer: Tokenizer) -> None:
    """Raise `InputError` for ids that the tokenizer doesn't declare."""
    if not documents:
        return
    lowest, highest = min(int(ids.min()) for ids in documents), max(int(ids.max()) for ids in documents)
    if not 0 <= lowest <= highest < tokenizer.vocab_size:
        raise InputError(
            f"tokenizer {tokenizer.name!r} gave ids from {lowest} to {highest},"
            f" outside its vocab_size {tokenizer.vocab_size}"
        )
