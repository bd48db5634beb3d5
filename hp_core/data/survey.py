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
from hp_core.data.packing import PackedRows
from hp_core.data.protocols import DataReport, Datasets, RowDataset, Tokenizer
from hp_core.data.rows import WithEmptyRow
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
    """A split: its rows, what became of its documents, and the same for each named source."""

    name: str
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

    `num_documents`, `lengths` and `duplicates` are of everything that was read, validation included; None where the
    dataset doesn't tell its documents.
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
    splits = {name: dataset for name, dataset in named.items() if dataset is not None}
    if split not in splits:
        raise InputError(f"--split={split}: the recipe has no {split} data; its splits: {', '.join(splits)}")
    parts = _parts(datasets.train)
    lengths = np.concatenate([part.store.lengths for _, part in parts]) if parts else np.zeros(0, dtype=np.int64)
    repeated = _duplicates([part for _, part in parts])
    return Survey(
        splits=tuple(_split_facts(name, dataset) for name, dataset in splits.items()),
        num_documents=len(lengths) if parts else None,
        lengths=tuple(histogram(lengths[lengths > 0], datasets.train.max_seq_len)),
        num_duplicates=len(repeated),
        duplicates=tuple(repeated[:_DUPLICATES_SHOWN]),
        rows=tuple(_samples(splits[split], split, seed, num_rows, datasets.tokenizer)),
    )


def _inner(dataset: RowDataset) -> RowDataset:
    return dataset.dataset if isinstance(dataset, WithEmptyRow) else dataset


def _parts(dataset: RowDataset) -> list[tuple[str, PackedRows]]:
    """The packed rows of each source, with its name; none for a dataset of another kind."""
    inner = _inner(dataset)
    if isinstance(inner, MixedRows):
        return list(zip(inner.names, inner.parts, strict=True))
    return [("", inner)] if isinstance(inner, PackedRows) else []


def _split_facts(name: str, dataset: RowDataset) -> SplitFacts:
    inner = _inner(dataset)
    sources: tuple[SourceFacts, ...] = ()
    if isinstance(inner, MixedRows):
        triples = zip(inner.names, inner.epoch_rows, inner.parts, strict=True)
        sources = tuple(SourceFacts(source, count, part.report) for source, count, part in triples)
    return SplitFacts(name, len(dataset), dataset.max_seq_len, dataset.report, sources)


def _duplicates(parts: Sequence[PackedRows]) -> list[Duplicate]:
    where: list[tuple[PackedRows, int]] = []
    contents = array("Q")
    for part in parts:
        begin = 0
        for number, end in enumerate(np.cumsum(part.store.lengths).tolist()):
            # Documents without text all look the same, and are left out anyway.
            if end > begin:
                where.append((part, number))
                contents.append(document_hash(part.store.tokens[begin:end].astype(np.int64).tobytes()))
            begin = end
    pairs = ((where[first], where[again]) for first, again in duplicates(np.frombuffer(contents, dtype=np.uint64)))
    return [Duplicate(_locate(*first), _locate(*again)) for first, again in pairs]


def _locate(part: PackedRows, document: int) -> str:
    return part.store.locate(document)


def _samples(dataset: RowDataset, split: str, seed: int, num_rows: int, tokenizer: Tokenizer | None) -> list[ShownRow]:
    order: list[int] = list(range(len(dataset)))
    if split == "train":
        inner = _inner(dataset)
        mixture = inner.mixture if isinstance(inner, MixedRows) else None
        whole = GlobalOrder(len(dataset), fingerprint=dataset.fingerprint, seed=seed, rows_per_step=1, mixture=mixture)
        order = whole.permutation(0).tolist()
    return [shown_row(dataset, index, tokenizer, _locations(dataset, index)) for index in order[:num_rows]]


def _locations(dataset: RowDataset, index: int) -> list[str]:
    """Where the documents of a row stand in their source, as far as that is known."""
    inner = _inner(dataset)
    if isinstance(inner, MixedRows):
        number = inner.part_of(index)
        return _locations(inner.parts[number], index - sum(inner.sizes[:number]))
    if not isinstance(inner, PackedRows):
        return []
    return [inner.store.locate(document) for document in inner.plan.row(index).documents.tolist()]
