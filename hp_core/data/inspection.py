"""What a run would train on, in numbers and in samples: rows read as the run reads them, without a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hp_core.data.images.protocol import ImageTokenizer
from hp_core.data.protocols import IGNORED_LABEL, RowDataset, Sample, Tokenizer


@runtime_checkable
class ShowsTokens(Protocol):
    """A tokenizer that can show special tokens, which `decode` leaves out."""

    def decode_all(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens written out."""
        ...


@dataclass(frozen=True)
class Segment:
    """Tokens next to each other that are all targets, or none of them is."""

    text: str
    tokens: int
    trained: bool


@dataclass(frozen=True)
class ShownDocument:
    """One document (or a piece of one) of a row."""

    location: str
    segments: tuple[Segment, ...]

    @property
    def tokens(self) -> int:
        """Tokens in the row."""
        return sum(segment.tokens for segment in self.segments)

    @property
    def trained(self) -> int:
        """Those of them that are targets."""
        return sum(segment.tokens for segment in self.segments if segment.trained)


@dataclass(frozen=True)
class ShownRow:
    """One row, by its number, with the documents that lie in it."""

    index: int
    padding: int
    documents: tuple[ShownDocument, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        documents = [
            {**asdict(document), "tokens": document.tokens, "trained_tokens": document.trained}
            for document in self.documents
        ]
        return {"row": self.index, "padding": self.padding, "documents": documents}


def shown_row(dataset: RowDataset, index: int, tokenizer: Tokenizer | None, locations: Sequence[str]) -> ShownRow:
    """Read a row and cut it into documents, where its positions begin again.

    A token is a target when the label of the position before it is that token. The first token of a row that begins
    in the middle of a document is a target of the row before, and not shown as one here.
    """
    sample = dataset[index]
    used = _used(sample)
    documents = []
    for number, piece in enumerate(_pieces(sample["position_ids"][:used])):
        where = locations[number] if number < len(locations) else ""
        documents.append(ShownDocument(where, tuple(_segments(sample, piece, tokenizer))))
    return ShownRow(index, len(sample["input_ids"]) - used, tuple(documents))


def histogram(lengths: NDArray[np.int64], limit: int) -> list[tuple[int, int, int]]:
    """How many lengths lie in each of some ranges: (from, to, count), both ends in the range.

    The ranges double from 1 on; the one that holds `limit` is cut behind it, so that what fits a row and what doesn't
    are apart. Ranges before the first length and behind the last are left out.
    """
    if not len(lengths):
        return []
    longest = int(lengths.max())
    starts = sorted({2**power for power in range(longest.bit_length())} | {limit + 1})
    starts = [start for start in starts if start <= longest]
    places = np.searchsorted(starts, lengths, side="right") - 1
    counts = np.bincount(places[places >= 0], minlength=len(starts)).tolist()
    ends = [start - 1 for start in starts[1:]] + [longest]
    first = next((number for number, count in enumerate(counts) if count), 0)
    return list(zip(starts, ends, counts, strict=True))[first:]


def duplicates(hashes: NDArray[np.uint64]) -> list[tuple[int, int]]:
    """Each document that repeats an earlier one, with the first of its kind: (first, repeated), in order."""
    _, firsts, kinds = np.unique(hashes, return_index=True, return_inverse=True)
    first_of = firsts[kinds]
    repeated = np.flatnonzero(first_of != np.arange(len(hashes)))
    return list(zip(first_of[repeated].tolist(), repeated.tolist(), strict=True))


def _used(sample: Sample) -> int:
    padding = sample.get("is_padding")
    return len(sample["input_ids"]) if padding is None else int(np.count_nonzero(~padding))


def _pieces(positions: NDArray[np.int64]) -> Iterator[slice]:
    cuts = (np.flatnonzero(positions[1:] != positions[:-1] + 1) + 1).tolist()
    edges = [0, *cuts, len(positions)] if len(positions) else [0]
    for start, end in pairwise(edges):
        yield slice(start, end)


def _segments(sample: Sample, piece: slice, tokenizer: Tokenizer | None) -> Iterator[Segment]:
    ids: list[int] = sample["input_ids"][piece].tolist()
    labels: list[int] = sample["labels"][piece].tolist()
    trained = [False, *(label != IGNORED_LABEL for label in labels[:-1])]
    for is_trained, group in groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1]):
        run = [token for token, _ in group]
        yield Segment(_decoded(run, tokenizer), len(run), is_trained)


def _decoded(ids: list[int], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(map(str, ids))
    text = tokenizer.decode_all(ids) if isinstance(tokenizer, ShowsTokens) else tokenizer.decode(ids)
    if not isinstance(tokenizer, ImageTokenizer):
        return text
    token = tokenizer.image_token
    # An image has hundreds of them.
    return re.sub(rf"(?:{re.escape(token)}){{2,}}", lambda run: f"{token}×{run.group().count(token)}", text)
