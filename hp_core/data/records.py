"""What documents pass through: rows as read, and the same as tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hp_core.errors import InputError

if TYPE_CHECKING:
    from hp_core.data.images.placing import EncodedImage


class Place(NamedTuple):
    """Where a row stands in its source: the file's number from 0, and the line or row in it from 1 (0: all of it)."""

    part: int = 0
    number: int = 0


class Row(NamedTuple):
    """One row of a source. Without types (CSV), every value is text.

    `location` is the place for messages, such as `data/a.jsonl:12`. Rows with the same `group` go to the same side of
    a validation split; without one, the document's own content decides.
    """

    location: str
    fields: Mapping[str, Any]
    is_typed: bool = True
    place: Place = Place()
    group: str = ""


@dataclass(frozen=True, eq=False)
class Encoded:
    """One document as tokens, its end token included; none at all when it has no text.

    `trained[t]` says whether token `t` is a target (for the position before it); None: every token is. `weights[t]`
    is what it counts for as a target; None: 1. Both have the length of `ids`. `split_hash` decides the side of a
    validation split, and documents of the same content have the same. `values` are the document's columns, `images`
    those that some of its tokens stand for.
    """

    ids: NDArray[np.int64]
    split_hash: int
    trained: NDArray[np.bool_] | None = None
    weights: NDArray[np.float32] | None = None
    values: tuple[float, ...] = ()
    images: tuple[EncodedImage, ...] = ()


class Fields(tuple[str, ...]):
    """The fields of a row that are read, those that it may lack (`optional`) included."""

    optional: frozenset[str]

    def __new__(cls, required: Iterable[str], optional: Iterable[str] = ()) -> Fields:
        """The names, each once."""
        first, more = list(required), list(optional)
        made = super().__new__(cls, dict.fromkeys((*first, *more)))
        made.optional = frozenset(more) - frozenset(first)
        return made

    @property
    def required(self) -> tuple[str, ...]:
        """Those that every row must have."""
        return tuple(name for name in self if name not in self.optional)


def columns_to_read(available: Sequence[str], fields: Sequence[str]) -> list[str] | None:
    """Which columns of a source are read; None for all, so that the message about a missing field can list them."""
    used = fields if isinstance(fields, Fields) else Fields(fields)
    return [name for name in used if name in available] if set(used.required) <= set(available) else None


class Source(Protocol):
    """Rows that can be read any number of times, in the same order."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash of everything that changes the rows; which fields are asked for need not be in it."""
        ...

    def rows(self, fields: Sequence[str]) -> Iterator[Row | InputError]:
        """All rows, one by one. A row that can't be read is an `InputError` with its place, in the row's stead.

        `fields` are those that will be used; a columnar format reads no others if it has all that are required (those
        that `Fields` doesn't call optional). What leaves no next row of a file to go on with (damaged Parquet) is one
        such error too, and the next file follows. Raises `InputError` where the file system fails.
        """
        ...

    def locate(self, place: Place) -> str:
        """The place of a row for messages, much as `Row.location` tells it."""
        ...


class DocumentEncoder(Protocol):
    """Turns rows into documents of tokens. Pickled to the processes that encode."""

    @property
    def fingerprint(self) -> str:
        """A hash of everything that changes ids, masks, weights or columns of the same row."""
        ...

    @property
    def location(self) -> str:
        """Where files lie that rows name; they are the same rows wherever it is, and those files are known there."""
        ...

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a row that are read; `Fields` tells which a row may lack."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the numbers in `Encoded.values`."""
        ...

    @property
    def has_mask(self) -> bool:
        """Whether some documents have tokens that are not trained."""
        ...

    @property
    def has_weights(self) -> bool:
        """Whether some documents have weights."""
        ...

    @property
    def has_images(self) -> bool:
        """Whether some documents may have images."""
        ...

    def encode(self, rows: Sequence[Row]) -> list[Encoded | InputError]:
        """Each row as tokens, or what is wrong with it, with its place."""
        ...
