"""The data of a run, looked through as a whole: what each split and source holds, lengths, duplicates, samples."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hp_core.data.fingerprint import document_hash
from hp_core.data.inspection import ShownRow, duplicates, histogram, shown_row
from hp_core.data.mixed import MixedRows
from hp_core.data.order import GlobalOrder
from hp_core.data.packing import Documents, PackedRows
from hp_core.data.protocols import DataReport, Datasets, RowDataset, Tokenizer
from hp_core.data.rows import WithEmptyRow
from hp_core.data.streaming import StreamingRows
from hp_core.errors import InputError

_DUPLICATES_SHOWN = 10


@dataclass(frozen=True)
class SourceFacts:
    """A named source of a split; `epoch_rows` is how many of its rows an epoch takes."""

    name: str
    epoch_rows: int
    report: DataReport


@dataclass(frozen=True)
class SplitFacts:
    """A split: its rows, what became of its documents, and the same for each named source.

    Of a stream (`is_beginning`), only the first block is looked at.
    """

    name: str
    is_beginning: bool
    rows: int
    max_seq_len: int
    report: DataReport | None
    sources: tuple[SourceFacts, ...]


@dataclass(frozen=True)
class Duplicate:
    """A document whose content is that of an earlier one."""

    first: str
    repeated: str


@dataclass(frozen=True)
class Survey:
    """`lengths` are ranges of tokens a document, each with its count, before anything is cut; `rows` are samples.

    `num_documents`, `lengths` and `duplicates` are of everything that was read, all splits together, so that a document
    of the training data that is in the validation data too is told; None where the dataset doesn't tell its documents.
    """

    splits: tuple[SplitFacts, ...]
    num_documents: int | None
    lengths: tuple[tuple[int, int, int], ...]
    num_duplicates: int
    duplicates: tuple[Duplicate, ...]
    rows: tuple[ShownRow, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        splits = [
            {
                **asdict(split),
                "report": split.report and split.report.as_dict(),
                "sources": [{**asdict(one), "report": one.report.as_dict()} for one in split.sources],
            }
            for split in self.splits
        ]
        lengths = [{"from": low, "to": high, "documents": count} for low, high, count in self.lengths]
        return {**asdict(self), "splits": splits, "lengths": lengths, "rows": [row.as_dict() for row in self.rows]}


def survey(datasets: Datasets, *, split: str, seed: int, num_rows: int) -> Survey:
    """Look through the data; the samples are the first `num_rows` rows of a split in the order of a run's first epoch.

    Args:
        datasets: what the dataset component built.
        split: where the samples come from, `train` or `validation`; validation rows come in their own order.
        seed: `training.seed`, which the order of training rows depends on.
        num_rows: how many rows to show.

    Raises:
        InputError: there is no such split.
    """
    named = {"train": datasets.train, "validation": datasets.validation, "test": datasets.test}
    splits = {name: _Split.of(dataset) for name, dataset in named.items() if dataset is not None}
    if split not in splits:
        raise InputError(f"--split={split}: the recipe has no {split} data; its splits: {', '.join(splits)}")
    # Documents that are held out lie in the store of the others.
    stores = list({id(part.store): part.store for one in splits.values() for part in one.parts}.values())
    lengths = np.concatenate([np.zeros(0, dtype=np.int64), *(store.lengths for store in stores)])
    repeated = _repeated(stores)
    rows = splits[split].first_rows(num_rows, seed=seed, shuffled=split == "train")
    return Survey(
        splits=tuple(one.facts(name) for name, one in splits.items()),
        num_documents=len(lengths) if stores else None,
        lengths=tuple(histogram(lengths[lengths > 0], datasets.train.max_seq_len)),
        num_duplicates=len(repeated),
        duplicates=tuple(Duplicate(_locate(first), _locate(again)) for first, again in repeated[:_DUPLICATES_SHOWN]),
        rows=tuple(splits[split].shown(index, datasets.tokenizer) for index in rows),
    )


@dataclass(frozen=True)
class _Split:
    """A split's rows as its component made them, or those of the first block of a stream."""

    dataset: RowDataset
    is_beginning: bool

    @classmethod
    def of(cls, dataset: RowDataset) -> _Split:
        inner = dataset.dataset if isinstance(dataset, WithEmptyRow) else dataset
        return cls(inner.first_block(), True) if isinstance(inner, StreamingRows) else cls(inner, False)

    @property
    def parts(self) -> tuple[PackedRows, ...]:
        """The packed rows of each source; none for a dataset of another kind."""
        if isinstance(self.dataset, MixedRows):
            return self.dataset.parts
        return (self.dataset,) if isinstance(self.dataset, PackedRows) else ()

    def facts(self, name: str) -> SplitFacts:
        dataset = self.dataset
        sources: tuple[SourceFacts, ...] = ()
        if isinstance(dataset, MixedRows):
            triples = zip(dataset.names, dataset.epoch_rows, dataset.parts, strict=True)
            sources = tuple(SourceFacts(source, count, part.report) for source, count, part in triples)
        return SplitFacts(name, self.is_beginning, len(dataset), dataset.max_seq_len, dataset.report, sources)

    def first_rows(self, num_rows: int, *, seed: int, shuffled: bool) -> list[int]:
        """The numbers of the rows that come first, in a run's first epoch if `shuffled`."""
        if self.is_beginning or not shuffled:
            return list(range(min(num_rows, len(self.dataset))))
        mixture = self.dataset.mixture if isinstance(self.dataset, MixedRows) else None
        order = GlobalOrder(
            len(self.dataset), fingerprint=self.dataset.fingerprint, seed=seed, rows_per_step=1, mixture=mixture
        )
        first: list[int] = order.permutation(0)[:num_rows].tolist()
        return first

    def shown(self, index: int, tokenizer: Tokenizer | None) -> ShownRow:
        """A row, with the places of its documents as far as they are known."""
        part, number = self._packed(index)
        documents = [] if part is None else part.plan.row(number).documents.tolist()
        locations = [] if part is None else [part.store.locate(document) for document in documents]
        return shown_row(self.dataset, index, tokenizer, locations)

    def _packed(self, index: int) -> tuple[PackedRows | None, int]:
        """The packed rows that hold a row, and its number in them."""
        if isinstance(self.dataset, MixedRows):
            number = self.dataset.part_of(index)
            return self.dataset.parts[number], index - sum(self.dataset.sizes[:number])
        return self.dataset if isinstance(self.dataset, PackedRows) else None, index


# A store and the number of a document in it.
_Found = tuple[Documents, int]


def _repeated(stores: Sequence[Documents]) -> list[tuple[_Found, _Found]]:
    """Each document with the tokens of an earlier one: (first, repeated)."""
    where: list[_Found] = []
    contents = array("Q")
    for store in stores:
        begin = 0
        for number, end in enumerate(np.cumsum(store.lengths).tolist()):
            # Documents without text all look the same, and are left out anyway.
            if end > begin:
                where.append((store, number))
                content = store.tokens[np.arange(begin, end)].astype(np.int64).tobytes()
                images = b"" if store.images is None else store.images.of_document(number)["digest"].tobytes()
                contents.append(document_hash(content + images))
            begin = end
    pairs = duplicates(np.frombuffer(contents, dtype=np.uint64))
    return [(where[first], where[again]) for first, again in pairs]


def _locate(found: _Found) -> str:
    store, document = found
    return store.locate(document)
