"""Documents in rows of equal length, by a plan over their lengths and masks alone."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict, dataclass
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from hp_core.data.best_fit import best_fit_decreasing
from hp_core.data.fingerprint import fingerprint
from hp_core.data.images.pixels import ImageTransform
from hp_core.data.images.table import ImageTable, Records
from hp_core.data.layout import Layout as Layout
from hp_core.data.pieces import Mask, Numbers, Pieces, cut_at_rows, cut_to_length, kept_documents
from hp_core.data.protocols import IGNORED_LABEL, DataReport, Sample
from hp_core.errors import ArgumentError

# The array of the rows that holds what each target counts for, where documents or sources have weights.
WEIGHTS = "token_weights"
_RULE_VERSION = 2


class Tokens(Protocol):
    """Ids that are looked up by their positions."""

    def __getitem__(self, where: NDArray[np.int64], /) -> NDArray[np.integer[Any]]: ...


class Documents(Protocol):
    """Encoded documents: what `TokenStore` holds; see there."""

    @property
    def key(self) -> str:
        """A hash of everything that is held."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the documents' numbers."""
        ...

    @property
    def lengths(self) -> Numbers:
        """Tokens in each document; 0 for one without text."""
        ...

    def locate(self, document: int) -> str:
        """Where a document stands, for messages; empty where that isn't known."""
        ...

    @property
    def tokens(self) -> Tokens:
        """The ids of all documents, end to end."""
        ...

    @property
    def trained(self) -> Mask | None:
        """Whether each token is a target; None where all are."""
        ...

    @property
    def weights(self) -> NDArray[np.float32] | None:
        """What each token counts for as a target; None where all count for 1."""
        ...

    @property
    def values(self) -> NDArray[np.float32]:
        """Each document's columns, `[documents, columns]`."""
        ...

    @property
    def images(self) -> ImageTable | None:
        """The documents' images; None where they have none."""
        ...


@dataclass(frozen=True, eq=False)
class PackingPlan:
    """Which pieces of documents each row holds: row `i` those from `row_ends[i - 1]` to `row_ends[i]`, in order."""

    max_seq_len: int
    pieces: Pieces
    row_ends: Numbers
    report: DataReport

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.row_ends)

    def row(self, index: int) -> Pieces:
        """The pieces of a row."""
        begin, end = int(self.row_ends[index - 1]) if index else 0, int(self.row_ends[index])
        return self.pieces.take(np.arange(begin, end))


def plan_rows(
    lengths: Numbers,
    layout: Layout,
    selected: Mask | None = None,
    trained: Mask | None = None,
    images: Records | None = None,
) -> PackingPlan:
    """Plan the rows of the `selected` documents (default: all) of the given lengths.

    Documents without anything to predict are left out and counted. So are tokens of a document, split into pieces,
    that lie in a piece or row without any target: they would be computed for nothing.

    Args:
        lengths: `[documents]` tokens of each, as they lie in the store.
        layout: how long rows are, what shares one, and what becomes of documents that are longer.
        selected: `[documents]`
        trained: `[tokens]` whether each token of the store is a target; None if all are.
        images: those of all documents, of which none is cut; None where there are none.

    Raises `ArgumentError` for images and a layout that would cut them.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if images is not None and len(images) and layout.length_policy == "split":
        raise ArgumentError("length_policy", "'split' would cut images in two", "write drop, or truncate")
    whole, left_out = kept_documents(lengths, layout, selected, trained, images)
    pixels = None if images is None or layout.max_row_pixels is None else _pixels(whole, images)
    pieces, row_of = _placed(whole, layout, trained, pixels)
    order = np.argsort(row_of, kind="stable")
    pieces, row_of = pieces.take(order), row_of[order]
    is_last = np.append(row_of[1:] != row_of[:-1], True)[: len(row_of)]
    row_ends = np.flatnonzero(is_last) + 1
    num_tokens = int(pieces.sizes.sum())
    report = DataReport(
        documents=len(whole),
        tokens=num_tokens,
        targets=int(pieces.targets(trained).sum()),
        rows=len(row_ends),
        padding_tokens=len(row_ends) * layout.max_seq_len - num_tokens,
        dropped_tokens=int(whole.sizes.sum()) - num_tokens,
        split_documents=int(np.count_nonzero(np.bincount(pieces.documents) > 1)),
        images=0 if images is None else int(np.isin(images["document"], whole.documents).sum()) - left_out.cut_images,
        **asdict(left_out),
    )
    return PackingPlan(layout.max_seq_len, pieces, row_ends, report)


def _pixels(whole: Pieces, images: Records) -> Numbers:
    """How many pixels each piece has."""
    places = np.searchsorted(whole.documents, images["document"])
    own = np.append(whole.documents, -1)[places] == images["document"]
    own[own] = (images["start"] + images["size"])[own] <= whole.sizes[places[own]]
    return np.bincount(places[own], weights=images["pixels"][own], minlength=len(whole)).astype(np.int64)


def _placed(
    whole: Pieces, layout: Layout, trained: Mask | None, pixels: Numbers | None = None
) -> tuple[Pieces, Numbers]:
    """The pieces that fit rows, and the number of each one's row; rows in between may have none."""
    if layout.is_stream:
        pieces, row_of = cut_at_rows(whole, layout.max_seq_len)
        has_targets = np.bincount(row_of, weights=pieces.targets(trained))[row_of] > 0 if len(pieces) else row_of > 0
        return pieces.take(has_targets), row_of[has_targets]
    pieces = whole
    if layout.length_policy == "split":
        pieces = cut_to_length(whole, layout.max_seq_len)
        pieces = pieces.take(pieces.targets(trained) > 0)
    sizes = pieces.sizes
    if pixels is not None and layout.max_row_pixels is not None:
        # What takes the larger share of a row's tokens or pixels keeps both within bounds.
        sizes = np.maximum(sizes, -(-pixels * layout.max_seq_len // layout.max_row_pixels))
    if layout.packing == "best_fit":
        return pieces, best_fit_decreasing(sizes, layout.max_seq_len)
    if layout.packing == "sequential":
        return pieces, next_fit(sizes, layout.max_seq_len)
    return pieces, np.arange(len(pieces))


def next_fit(sizes: Numbers, capacity: int) -> Numbers:
    """The bin of each item: the latest bin if it has room, else a new one."""
    ends = np.cumsum(sizes).tolist()
    first: list[int] = []
    item = 0
    while item < len(ends):
        first.append(item)
        item = bisect_right(ends, (ends[item - 1] if item else 0) + capacity, lo=item)
    return np.searchsorted(np.array(first, dtype=np.int64), np.arange(len(ends)), side="right") - 1


class PackedRows:
    """The rows of a plan, read from the memory-mapped token store when asked for.

    In each row `labels[t]` is the token after position `t` in the same document if that is trained, even where it
    begins another row; a document's last token has none. `position_ids` restart with every piece of a document. The
    padding behind the last piece is a piece of its own, with `eos_id` as input and no targets. Each column of the
    store is a float32 array that holds, at each position of a document, the document's value, and 0 in padding.

    With a `loss_weight`, `token_weights` holds what the target of each position counts for: the target's weight in
    the store times the `loss_weight`, and 0 where there is no target. `images` is what a `transform` makes of
    the row's images, or without one their records; rows without any have none.
    """

    def __init__(
        self,
        store: Documents,
        plan: PackingPlan,
        *,
        eos_id: int,
        loss_weight: float | None = None,
        transform: ImageTransform | None = None,
    ) -> None:
        self.store = store
        self.plan = plan
        self.eos_id = eos_id
        self.loss_weight = loss_weight
        self.transform = transform
        self.max_seq_len = plan.max_seq_len
        self.report = plan.report
        pieces = plan.pieces
        arrays = (plan.row_ends, pieces.starts, pieces.sizes, pieces.ends, pieces.closes)
        images = () if store.images is None else ("images", store.images.records["digest"].tobytes())
        settings = (store.key, plan.max_seq_len, loss_weight, *images)
        self.fingerprint = fingerprint("packed rows", _RULE_VERSION, *settings, *(one.tobytes() for one in arrays))

    @property
    def columns(self) -> tuple[str, ...]:
        """The arrays that its rows have beside those of every row."""
        return self.store.columns if self.loss_weight is None else (*self.store.columns, WEIGHTS)

    @property
    def row_targets(self) -> NDArray[np.int64]:
        """How many targets each row has: `[rows]`."""
        of_pieces = self.plan.pieces.targets(self.store.trained)
        ends = np.cumsum(of_pieces)[self.plan.row_ends - 1]
        return np.diff(ends, prepend=0)

    @property
    def has_images(self) -> bool:
        """Whether some row has an image."""
        return self.report.images > 0

    def __len__(self) -> int:
        return self.plan.num_rows

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        pieces, length = self.plan.row(index), self.max_seq_len
        sizes = pieces.sizes
        size = int(sizes.sum())
        positions = np.arange(size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        stored = positions + np.repeat(pieces.starts, sizes)
        has_target = stored + 1 < np.repeat(pieces.ends, sizes)
        if self.store.trained is not None:
            has_target[has_target] = self.store.trained[stored[has_target] + 1]
        next_stored = stored[has_target] + 1

        input_ids = np.full(length, self.eos_id, dtype=np.int64)
        labels = np.full(length, IGNORED_LABEL, dtype=np.int64)
        position_ids = np.arange(length) - size
        input_ids[:size] = self.store.tokens[stored]
        labels[:size][has_target] = self.store.tokens[next_stored]
        position_ids[:size] = positions
        closing = np.cumsum(sizes)[pieces.closes] - 1
        input_ids[closing] = self.eos_id
        labels[closing - 1] = self.eos_id
        sample: dict[str, Any] = {
            "index": int(index),
            "input_ids": input_ids,
            "labels": labels,
            "position_ids": position_ids,
            "is_padding": np.arange(length) >= size,
        }
        for number, name in enumerate(self.store.columns):
            column = np.zeros(length, dtype=np.float32)
            column[:size] = np.repeat(self.store.values[pieces.documents, number], sizes)
            sample[name] = column
        if self.loss_weight is not None:
            weights = np.zeros(length, dtype=np.float32)
            own = np.float32(1) if self.store.weights is None else self.store.weights[next_stored]
            weights[:size][has_target] = own * np.float32(self.loss_weight)
            sample[WEIGHTS] = weights
        if self.store.images is not None:
            records = _records(pieces, self.store.images)
            if len(records):
                read = self.transform
                sample["images"] = records if read is None else read(self.store.images, records, self.store.locate)
        return cast(Sample, sample)


def _records(pieces: Pieces, images: ImageTable) -> Records:
    """The images of a row's documents, of which each is there from its beginning on."""
    found = []
    for document, size in zip(pieces.documents.tolist(), pieces.sizes.tolist(), strict=True):
        own = images.of_document(document)
        found.append(own[own["start"] + own["size"] <= size])
    return np.concatenate(found)
