"""From a source of documents and a tokenizer to training and validation rows."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hp_core.data.fingerprint import fingerprint
from hp_core.data.packing import MIN_SEQ_LEN, PackedRows, plan_rows
from hp_core.data.protocols import Datasets, Tokenizer, TrainableTokenizer
from hp_core.data.rows import WithEmptyRow
from hp_core.data.sources import Source
from hp_core.data.split import held_out
from hp_core.data.tokens import TokenStore, build_tokens, document_bytes, split_hash
from hp_core.errors import ArgumentError, InputError


def build_datasets(
    source: Source,
    *,
    tokenizer: Tokenizer | TrainableTokenizer | None,
    max_seq_len: int,
    cache_dir: Path,
    validation_fraction: float = 0.0,
    validation_source: Source | None = None,
    columns: Sequence[str] = (),
) -> Datasets:
    """Encode, split and pack the documents of `source`: all that a text dataset component has left to do.

    Validation documents are those of `validation_source`, or the `validation_fraction` of `source` that
    `hp_core.data.split.held_out` picks; a trainable tokenizer never sees them. `columns` names the documents'
    `values`, which become arrays of the rows. Raises `ArgumentError` for arguments that can't be used and `InputError`
    for documents that can't.
    """
    if tokenizer is None:
        raise ArgumentError("tokenizer", "this dataset needs a tokenizer", "add `tokenizer: {name: bytes}`")
    if max_seq_len < MIN_SEQ_LEN:
        raise ArgumentError("max_seq_len", f"{max_seq_len} is below {MIN_SEQ_LEN}, a token and its target")
    if validation_source is not None and validation_fraction:
        raise ArgumentError("validation_fraction", "validation documents are given too", "drop one of them")
    if isinstance(tokenizer, TrainableTokenizer):
        tokenizer = tokenizer.train(
            _training_texts(source, validation_fraction),
            data_fingerprint=fingerprint("training documents", source.fingerprint, float(validation_fraction)),
            cache_dir=cache_dir,
        )
    store = build_tokens(source, tokenizer, cache_dir, columns)
    held = held_out(store.hashes, store.lengths > 0, validation_fraction)
    validation: WithEmptyRow | None = None
    if validation_source is not None:
        validation_store = build_tokens(validation_source, tokenizer, cache_dir, columns)
        validation = _rows(validation_store, None, max_seq_len, tokenizer, "validation")
    elif held.any():
        validation = _rows(store, held, max_seq_len, tokenizer, "validation")
    return Datasets(
        train=_rows(store, ~held, max_seq_len, tokenizer, "training"), validation=validation, tokenizer=tokenizer
    )


def _rows(
    store: TokenStore, selected: NDArray[np.bool_] | None, max_seq_len: int, tokenizer: Tokenizer, role: str
) -> WithEmptyRow:
    plan = plan_rows(store.lengths, max_seq_len, selected)
    if plan.num_rows == 0:
        raise InputError(
            f"the {role} data has nothing to predict: {plan.report.empty_documents} documents without text,"
            f" {plan.report.short_documents} of one token, none longer"
        )
    return WithEmptyRow(PackedRows(store, plan, pad_id=tokenizer.eos_id))


def _training_texts(source: Source, validation_fraction: float) -> Iterator[str]:
    """The texts that are not held out; two passes, because one text alone can't tell that it is the only one."""
    held: Iterable[bool] = repeat(False)
    if validation_fraction:
        hashes, has_text = array("Q"), array("b")
        for document in source.documents():
            hashes.append(split_hash(document))
            has_text.append(bool(document.text))
        held = held_out(
            np.frombuffer(hashes, dtype=np.uint64), np.frombuffer(has_text, dtype=np.bool_), validation_fraction
        )
    for document, is_held in zip(source.documents(), held):  # noqa: B905 (repeat has no end)
        if not is_held:
            document_bytes(document)
            yield document.text
