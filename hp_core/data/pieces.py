"""Documents cut into pieces that fit a row, by their lengths and masks alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hp_core.data.images.table import Records
from hp_core.data.layout import Layout

# Tokens whose running count is held at a time.
_BLOCK = 1 << 24

Mask = NDArray[np.bool_]
Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Runs of neighbouring tokens of a store, `[pieces]` each.

    `documents` are their documents' numbers, `starts` where they begin in the store and `sizes` their tokens. No token
    from `ends` on is a target: it belongs to another document, or is cut off. The last token of those that `closes`
    marks is replaced by the end token.
    """

    documents: Numbers
    starts: Numbers
    sizes: Numbers
    ends: Numbers
    closes: Mask

    def __len__(self) -> int:
        return len(self.documents)

    def take(self, chosen: Mask | Numbers) -> Pieces:
        """The pieces of a mask, or of numbers in their order."""
        of_each = (self.documents[chosen], self.starts[chosen], self.sizes[chosen], self.ends[chosen])
        return Pieces(*of_each, self.closes[chosen])

    def targets(self, trained: Mask | None) -> Numbers:
        """How many of each piece's positions have a target."""
        return count_trained(trained, self.starts + 1, np.minimum(self.starts + self.sizes + 1, self.ends))


@dataclass(frozen=True)
class LeftOut:
    """How many of the selected documents are not in the rows, or only in part, and what is cut off."""

    empty_documents: int
    short_documents: int
    dropped_documents: int
    pixel_documents: int
    untargeted_documents: int
    cut_documents: int
    cut_tokens: int
    cut_images: int = 0


def kept_documents(
    lengths: Numbers, layout: Layout, selected: Mask | None, trained: Mask | None, images: Records | None = None
) -> tuple[Pieces, LeftOut]:
    """What the length policy leaves of each document, as one piece, however long.

    Documents of 0 (empty) or 1 token (nothing to predict) are left out, and after cutting those without any target.
    One whose images have more pixels than a row may have is too long as well. None is cut within one of its `images`:
    those that would be are left out with what is behind.
    """
    chosen = np.ones(len(lengths), dtype=bool) if selected is None else selected
    documents = np.flatnonzero(chosen & (lengths >= 2))
    whole = lengths[documents]
    own_images = None if images is None else _Images.among(documents, images, layout.max_row_pixels)
    sizes = whole if layout.length_policy == "split" else np.minimum(whole, layout.max_seq_len)
    if own_images is not None:
        sizes = own_images.seen(sizes)
    num_dropped = num_beyond = 0
    if layout.length_policy == "drop":
        fits = sizes == whole
        num_dropped = int(np.count_nonzero(whole > layout.max_seq_len))
        num_beyond = int(np.count_nonzero(~fits)) - num_dropped
        documents, whole = documents[fits], whole[fits]
        sizes, own_images = whole, None
    if own_images is not None:
        sizes = own_images.uncut(sizes, (layout.length_policy == "truncate_eos") & (sizes < whole))
    starts = (np.cumsum(lengths) - lengths)[documents]
    is_cut = sizes < whole
    closes = np.zeros(len(documents), dtype=bool)
    if layout.length_policy == "truncate_eos":
        last = starts + sizes - 1
        closes[is_cut] = True if trained is None else trained[last[is_cut]]
    pieces = Pieces(documents, starts, sizes, starts + sizes, closes)
    has_targets = pieces.targets(trained) > 0
    cut_off = (whole - sizes)[has_targets]
    left_out = LeftOut(
        empty_documents=int(np.count_nonzero(chosen & (lengths == 0))),
        short_documents=int(np.count_nonzero(chosen & (lengths == 1))),
        dropped_documents=num_dropped,
        pixel_documents=num_beyond,
        untargeted_documents=int(np.count_nonzero(~has_targets)),
        cut_documents=int(np.count_nonzero(cut_off)),
        cut_tokens=int(cut_off.sum()),
        cut_images=0 if own_images is None else int(own_images.lost(sizes)[has_targets].sum()),
    )
    return pieces.take(has_targets), left_out


@dataclass(frozen=True, eq=False)
class _Images:
    """The images of some documents: the place of each one's document among them, and where it begins and ends in it.

    `is_beyond` marks those with which a document has more pixels than a row may have.
    """

    of: Numbers
    begins: Numbers
    ends: Numbers
    is_beyond: Mask

    @classmethod
    def among(cls, documents: Numbers, images: Records, max_pixels: int | None) -> _Images:
        places = np.searchsorted(documents, images["document"])
        is_among = np.append(documents, -1)[places] == images["document"]
        own, of = images[is_among], places[is_among]
        running = np.cumsum(own["pixels"])
        # They lie in the order of documents and of their tokens.
        before = (running - own["pixels"])[np.searchsorted(of, of)]
        is_beyond = np.zeros(len(of), dtype=bool) if max_pixels is None else running - before > max_pixels
        return cls(of, own["start"], own["start"] + own["size"], is_beyond)

    def seen(self, sizes: Numbers) -> Numbers:
        """The sizes, reduced to where an image begins that is too many."""
        reduced: Numbers = sizes.copy()
        np.minimum.at(reduced, self.of[self.is_beyond], self.begins[self.is_beyond])
        return reduced

    def uncut(self, sizes: Numbers, closes: Mask) -> Numbers:
        """The sizes, where one ends within an image reduced to where the image begins.

        `closes`: `[documents]` where the end token takes the place of the last one, which no image can spare.
        """
        reduced: Numbers = sizes.copy()
        while True:
            room = reduced - closes
            is_cut = (self.begins < reduced[self.of]) & (self.ends > room[self.of])
            if not is_cut.any():
                return reduced
            # Another image may end where this one begins.
            np.minimum.at(reduced, self.of[is_cut], self.begins[is_cut])

    def lost(self, sizes: Numbers) -> Numbers:
        """How many images of each document lie behind its size."""
        lost: Numbers = np.bincount(self.of[self.ends > sizes[self.of]], minlength=len(sizes))
        return lost


def cut_to_length(whole: Pieces, max_seq_len: int) -> Pieces:
    """The pieces cut every `max_seq_len` tokens; the next token stays the last target of each."""
    number = -(-whole.sizes // max_seq_len)
    parent = np.repeat(np.arange(len(whole)), number)
    offsets = (np.arange(len(parent)) - np.repeat(np.cumsum(number) - number, number)) * max_seq_len
    return _parts(whole, parent, offsets, np.minimum(whole.sizes[parent] - offsets, max_seq_len))


def cut_at_rows(whole: Pieces, max_seq_len: int) -> tuple[Pieces, Numbers]:
    """The pieces laid end to end and cut every `max_seq_len` tokens of all; also the number of each part's row."""
    stream_ends = np.cumsum(whole.sizes)
    total = int(stream_ends[-1]) if len(whole) else 0
    # Not np.union1d, whose hashing takes fifty times as long as merging two sorted runs.
    ends = np.sort(np.concatenate([stream_ends, np.arange(max_seq_len, total, max_seq_len)]), kind="stable")
    ends = ends[np.append(ends[1:] != ends[:-1], True)[: len(ends)]]
    begins = np.concatenate([np.zeros(min(1, len(ends)), dtype=np.int64), ends[:-1]])
    parent = np.searchsorted(stream_ends, begins, side="right")
    offsets = begins - (stream_ends - whole.sizes)[parent]
    return _parts(whole, parent, offsets, ends - begins), begins // max_seq_len


def _parts(whole: Pieces, parent: Numbers, offsets: Numbers, sizes: Numbers) -> Pieces:
    parts = whole.take(parent)
    return Pieces(parts.documents, parts.starts + offsets, sizes, parts.ends, parts.closes)


def count_trained(trained: Mask | None, begins: Numbers, ends: Numbers) -> Numbers:
    """How many tokens of each range of a store are trained; all where there is no mask."""
    if trained is None:
        sizes: Numbers = np.maximum(ends - begins, 0)
        return sizes
    before = _count_before(trained, np.concatenate([begins, np.maximum(ends, begins)]))
    counts: Numbers = before[len(begins) :] - before[: len(begins)]
    return counts


def _count_before(trained: Mask, positions: Numbers) -> Numbers:
    """How many trained tokens lie before each position; in blocks, because a store may be larger than memory."""
    order = np.argsort(positions, kind="stable")
    ascending = positions[order]
    counts = np.empty(len(positions), dtype=np.int64)
    total = 0
    for begin in range(0, max(len(trained), 1), _BLOCK):
        block = np.concatenate([[0], np.cumsum(trained[begin : begin + _BLOCK], dtype=np.int64)])
        first, last = np.searchsorted(ascending, (begin, begin + _BLOCK))
        if begin + _BLOCK >= len(trained):
            last = len(ascending)
        counts[order[first:last]] = total + block[ascending[first:last] - begin]
        total += int(block[-1])
    return counts
