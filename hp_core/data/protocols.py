"""What the parts of the data layer promise one another: tokenizers, datasets, rows and reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from typing_extensions import NotRequired

if TYPE_CHECKING:
    from hp_core.parallel.setup import DistributedSetup

IGNORED_LABEL = -100
EMPTY_ROW = -1


@runtime_checkable
class Tokenizer(Protocol):
    """Turns text into token ids and back.

    `fingerprint` changes whenever the same text could give other ids; it is part of the token cache's key.
    """

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id it can give."""
        ...

    @property
    def eos_id(self) -> int:
        """The id that ends every document."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash of everything that changes ids."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, with the tokenizer's own rule for BOS and without EOS."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""
        ...

    def save(self, directory: Path) -> None:
        """Write the files `transformers.AutoTokenizer` loads it from."""
        ...


@runtime_checkable
class TrainableTokenizer(Protocol):
    """A tokenizer that is learned from the training documents before the first of them is encoded."""

    @property
    def fingerprint(self) -> str:
        """A hash of the training settings."""
        ...

    def train(self, documents: Iterable[str], *, data_fingerprint: str, cache_dir: Path) -> Tokenizer:
        """The tokenizer learned from `documents`, which are not read when the result is cached.

        `data_fingerprint` identifies the documents; the result is a pure function of it and `fingerprint`.
        """
        ...


@dataclass(frozen=True)
class MeshContext:
    """Where this process stands among all (`rank`) and among those that read different data (`dp_rank`)."""

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    local_rank: int = 0

    @classmethod
    def of(cls, setup: DistributedSetup) -> MeshContext:
        """Where the process of `setup` stands."""
        return cls(setup.rank, setup.world_size, setup.dp_rank, setup.dp_size, setup.environment.local_rank)


class Sample(TypedDict):
    """One row: three int64 arrays of `max_seq_len` and the row's number (-1 for an empty row).

    `labels[t]` is the target of position `t`, already shifted, and -100 where there is none. `position_ids`
    restart with every piece of a document. `is_padding`, where a dataset has any, is true at positions without a
    token. `images` is what a model takes of the row's images, joined; a row without any has none. A dataset may add
    arrays of its own; the collator stacks them too, and a loss is given those that it declares as `columns`.
    """

    index: int
    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    is_padding: NotRequired[NDArray[np.bool_]]
    images: NotRequired[Mapping[str, NDArray[Any]]]


@dataclass(frozen=True)
class DataReport:
    """What became of the documents of one dataset.

    `documents` are those in the rows; `tokens` are input tokens in the rows, `targets` the supervised ones. Left out
    are `empty_documents` (no text), `short_documents` (one token, so nothing to predict), `dropped_documents` (longer
    than a row, where the length policy says so), `pixel_documents` (of more pixels than a row, likewise),
    `untargeted_documents` (no token to predict is trained, maybe after cutting) and `faulty_rows` of the source.

    Of the documents in the rows, `cut_documents` lack their end, altogether `cut_tokens`, and `split_documents` lie in
    several pieces or rows; `dropped_tokens` of those lie in pieces or rows without any target, which are left out.
    `images` are those in the rows, `cut_images` those that were cut off.
    """

    documents: int
    tokens: int
    targets: int
    rows: int
    padding_tokens: int
    empty_documents: int = 0
    short_documents: int = 0
    dropped_tokens: int = 0
    dropped_documents: int = 0
    pixel_documents: int = 0
    untargeted_documents: int = 0
    cut_documents: int = 0
    cut_tokens: int = 0
    split_documents: int = 0
    faulty_rows: int = 0
    images: int = 0
    cut_images: int = 0

    @property
    def fill(self) -> float:
        """The share of all positions that hold a token, from 0 to 1."""
        positions = self.tokens + self.padding_tokens
        return self.tokens / positions if positions else 0.0

    @classmethod
    def total(cls, reports: Sequence[DataReport]) -> DataReport:
        """The sums of several reports."""
        held = [asdict(report) for report in reports]
        return cls(**{name: sum(one[name] for one in held) for name in held[0]})

    def told(self) -> str:
        """What became of documents, rows and tokens that are not in the rows as they are; empty if all are."""
        left_out = (
            (self.empty_documents, "empty documents"),
            (self.short_documents, "documents of one token"),
            (self.dropped_documents, "documents longer than a row"),
            (self.pixel_documents, "documents of more pixels than a row"),
            (self.untargeted_documents, "documents without a target"),
            (self.faulty_rows, "faulty rows"),
            (self.dropped_tokens, "tokens without a target"),
        )
        told = ", ".join(f"{number:,} {what}" for number, what in left_out if number)
        line = f"; left out: {told}" if told else ""
        if self.cut_documents:
            line += f"; cut: {self.cut_documents:,} documents by {self.cut_tokens:,} tokens"
        if self.cut_images:
            line += f" and {self.cut_images:,} images"
        if self.split_documents:
            line += f"; split: {self.split_documents:,} documents"
        return line

    def told_images(self) -> str:
        """How many images the rows have; empty if none."""
        return f" with {self.images:,} image{'s' * (self.images != 1)}" if self.images else ""

    def as_dict(self) -> dict[str, int | float]:
        """Every field and `fill`, for manifests and metrics."""
        return {**asdict(self), "fill": self.fill}


class RowDataset(Protocol):
    """Rows of equal length, addressed by number; row -1 is an empty row (see `WithEmptyRow`)."""

    @property
    def fingerprint(self) -> str:
        """A hash of everything that changes a row; the global order is derived from it."""
        ...

    @property
    def max_seq_len(self) -> int:
        """The length of every row."""
        ...

    @property
    def report(self) -> DataReport | None:
        """What became of the documents, or None when the dataset doesn't know."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


@dataclass(frozen=True)
class Datasets:
    """What a dataset component builds; `tokenizer` is the one the rows were made with, trained if need be."""

    train: RowDataset
    validation: RowDataset | None = None
    test: RowDataset | None = None
    tokenizer: Tokenizer | None = None
