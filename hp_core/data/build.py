"""From sources of rows and a tokenizer to training and validation rows."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hp_core.data.fields import RowText
from hp_core.data.fingerprint import fingerprint
from hp_core.data.mixed import MixedRows
from hp_core.data.packing import Layout, PackedRows, plan_rows
from hp_core.data.protocols import Datasets, Tokenizer, TrainableTokenizer
from hp_core.data.reading import Faults, Reading
from hp_core.data.records import DocumentEncoder, Row, Source
from hp_core.data.rows import WithEmptyRow
from hp_core.data.split import held_out
from hp_core.data.text import split_hash, utf8
from hp_core.data.tokens import TokenStore, build_tokens
from hp_core.errors import ArgumentError, InputError


@dataclass(frozen=True)
class Part:
    """One source of a dataset. A dataset of one part without a name isn't a mixture.

    `encoder` makes the encoder of its rows for the run's tokenizer. `text` is what a tokenizer that is yet to be
    learned reads of a row; None where it can't be. `weight` is the part's share of an epoch, None for its own size.
    `loss_weight` multiplies what each of its targets counts for.
    """

    name: str
    source: Source
    encoder: Callable[[Tokenizer], DocumentEncoder]
    text: RowText | None = None
    weight: float | None = None
    loss_weight: float = 1.0


def build_datasets(
    parts: Sequence[Part],
    *,
    tokenizer: Tokenizer | TrainableTokenizer | None,
    layout: Layout,
    reading: Reading,
    validation_fraction: float = 0.0,
    validation_parts: Sequence[Part] = (),
) -> Datasets:
    """Encode, split and pack the rows of `parts`: all that a dataset component has left to do.

    Validation documents are those of `validation_parts`, or the `validation_fraction` of all documents that
    `hp_core.data.split.held_out` picks; a trainable tokenizer never sees them. Raises `ArgumentError` for arguments
    that can't be used and `InputError` for rows that can't.
    """
    if tokenizer is None:
        raise ArgumentError("tokenizer", "this dataset needs a tokenizer", "add `tokenizer: {name: bytes}`")
    if validation_parts and validation_fraction:
        raise ArgumentError("validation_fraction", "validation documents are given too", "drop one of them")
    if isinstance(tokenizer, TrainableTokenizer):
        tokenizer = _learned(tokenizer, parts, validation_fraction, reading)
    stores = _stores(parts, tokenizer, reading)
    held = _held_out(stores, validation_fraction)
    validation: WithEmptyRow | None = None
    if validation_parts:
        validation_stores = _stores(validation_parts, tokenizer, reading)
        everything = [np.ones(len(store.lengths), dtype=bool) for store in validation_stores]
        validation = _rows(validation_parts, validation_stores, everything, layout, tokenizer, "validation")
    elif any(one.any() for one in held):
        validation = _rows(parts, stores, held, layout, tokenizer, "validation")
    train = _rows(parts, stores, [~one for one in held], layout, tokenizer, "training")
    return Datasets(train=train, validation=validation, tokenizer=tokenizer)


def _stores(parts: Sequence[Part], tokenizer: Tokenizer, reading: Reading) -> list[TokenStore]:
    return [build_tokens(part.source, part.encoder(tokenizer), reading) for part in parts]


def _held_out(stores: Sequence[TokenStore], fraction: float) -> list[NDArray[np.bool_]]:
    """For each store, which of its documents are held out: chosen among the documents of all."""
    hashes = np.concatenate([store.hashes for store in stores])
    has_text = np.concatenate([store.lengths > 0 for store in stores])
    ends = np.cumsum([len(store.lengths) for store in stores])
    return np.split(held_out(hashes, has_text, fraction), ends[:-1])


def _rows(
    parts: Sequence[Part],
    stores: Sequence[TokenStore],
    selected: Sequence[NDArray[np.bool_]],
    layout: Layout,
    tokenizer: Tokenizer,
    role: str,
) -> WithEmptyRow:
    """The rows of the selected documents; only validation may have none of a part."""
    packed: list[PackedRows] = []
    names: list[str] = []
    for part, store, chosen in zip(parts, stores, selected, strict=True):
        plan = plan_rows(store.lengths, layout, chosen)
        if plan.num_rows == 0 and (role == "training" or len(parts) == 1):
            source = f" of the source {part.name!r}" if part.name else ""
            raise InputError(
                f"the {role} data{source} has nothing to predict: {plan.report.empty_documents} documents without text,"
                f" {plan.report.short_documents} of one token, none longer"
            )
        if plan.num_rows:
            packed.append(PackedRows(store, plan, pad_id=tokenizer.eos_id))
            names.append(part.name)
    if not packed:
        raise InputError(f"the {role} data has nothing to predict in any of its {len(parts)} sources")
    if names == [""]:
        return WithEmptyRow(packed[0])
    return WithEmptyRow(MixedRows(packed, names))


def _learned(
    tokenizer: TrainableTokenizer, parts: Sequence[Part], validation_fraction: float, reading: Reading
) -> Tokenizer:
    texts: list[tuple[Source, RowText]] = []
    for part in parts:
        if part.text is None:
            name = part.name or part.source.name
            raise ArgumentError("tokenizer", f"a tokenizer can't be learned from {name!r}", "name a finished tokenizer")
        texts.append((part.source, part.text))
    identity = [one for source, text in texts for one in (source.fingerprint, *text.identity)]
    return tokenizer.train(
        _training_texts(texts, validation_fraction, reading),
        data_fingerprint=fingerprint("training documents", *identity, float(validation_fraction)),
        cache_dir=reading.cache_dir,
    )


def _training_texts(
    texts: Sequence[tuple[Source, RowText]], validation_fraction: float, reading: Reading
) -> Iterator[str]:
    """The texts that are not held out; two passes, because one text alone can't tell that it is the only one."""
    held: NDArray[np.bool_] | None = None
    if validation_fraction:
        hashes, has_text = array("Q"), array("b")
        for content_hash, text in _texts(texts, reading):
            hashes.append(content_hash)
            has_text.append(bool(text))
        held = held_out(
            np.frombuffer(hashes, dtype=np.uint64), np.frombuffer(has_text, dtype=np.bool_), validation_fraction
        )
    for number, (_, text) in enumerate(_texts(texts, reading)):
        if held is None or not held[number]:
            yield text


def _texts(texts: Sequence[tuple[Source, RowText]], reading: Reading) -> Iterator[tuple[int, str]]:
    """Each text with its hash; faulty rows are left out or refused as when they are encoded."""
    for source, text in texts:
        faults = Faults(source.name)
        for row in source.rows(text.fields):
            one = row if isinstance(row, InputError) else _text(row, text)
            if isinstance(one, InputError):
                faults.add(one)
                faults.require(reading)
            else:
                yield one


def _text(row: Row, text: RowText) -> tuple[int, str] | InputError:
    try:
        content = text(row)
        utf8(row, content)
        return split_hash(row, content), content
    except InputError as error:
        return error
