"""From sources of rows and a tokenizer to training and validation rows."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hp_core.data.columns import float32_fault
from hp_core.data.fields import RowText
from hp_core.data.fingerprint import fingerprint
from hp_core.data.images.pixels import ImageTransform
from hp_core.data.megatron import MegatronSource, MegatronStore
from hp_core.data.mixed import MixedRows
from hp_core.data.mixture import Mixture
from hp_core.data.packing import WEIGHTS, Layout, PackedRows, PackingPlan, plan_rows
from hp_core.data.protocols import DataReport, Datasets, MeshContext, Tokenizer, TrainableTokenizer
from hp_core.data.reading import Faults, Reading
from hp_core.data.records import DocumentEncoder, Row, Source
from hp_core.data.rows import WithEmptyRow
from hp_core.data.split import held_out
from hp_core.data.streaming import BlockStream, StreamingRows, StreamingSource
from hp_core.data.text import split_hash, utf8
from hp_core.data.tokens import TokenStore, build_tokens
from hp_core.errors import ArgumentError, InputError


@dataclass(frozen=True)
class Part:
    """One source of a dataset. A dataset of one part without a name isn't a mixture.

    `encoder` makes the encoder of its rows for the run's tokenizer; tokens of Megatron need none. `text` is what a
    tokenizer that is yet to be learned reads of a row; None where it can't be. `weight` is the part's share of an
    epoch, None for its own size. `loss_weight` multiplies what each of its targets counts for.
    """

    name: str
    source: Source | MegatronSource
    encoder: Callable[[Tokenizer], DocumentEncoder]
    text: RowText | None = None
    weight: float | None = None
    loss_weight: float = 1.0


def build_data(
    parts: Sequence[Part],
    *,
    tokenizer: Tokenizer | TrainableTokenizer | None,
    layout: Layout,
    reading: Reading,
    validation_fraction: float,
    validation_parts: Sequence[Part],
    temperature: float | None,
    block_documents: int | None,
    mesh_context: MeshContext | None,
    transform: ImageTransform | None = None,
) -> Datasets:
    """What `build_stream` makes of the one part, with `block_documents`, or else what `build_datasets` makes of all."""
    if block_documents is None:
        return build_datasets(
            parts,
            tokenizer=tokenizer,
            layout=layout,
            reading=reading,
            validation_fraction=validation_fraction,
            validation_parts=validation_parts,
            temperature=temperature,
            transform=transform,
        )
    (part,) = parts
    return build_stream(
        part,
        tokenizer=tokenizer,
        layout=layout,
        reading=reading,
        block_documents=block_documents,
        mesh_context=mesh_context or MeshContext(),
        validation_parts=validation_parts,
        transform=transform,
    )


def build_datasets(
    parts: Sequence[Part],
    *,
    tokenizer: Tokenizer | TrainableTokenizer | None,
    layout: Layout,
    reading: Reading,
    validation_fraction: float = 0.0,
    validation_parts: Sequence[Part] = (),
    temperature: float | None = None,
    transform: ImageTransform | None = None,
) -> Datasets:
    """Encode, split and pack the rows of `parts`: all that a dataset component has left to do.

    With a `temperature`, or weights of all parts, an epoch takes of each part what `Mixture` says; else, and in
    validation, it takes every row once. Validation documents are those of `validation_parts`, or the
    `validation_fraction` of all documents that `hp_core.data.split.held_out` picks; a trainable tokenizer never sees
    them. `transform` makes of images what a model takes; None leaves them out. Raises `ArgumentError` for arguments
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
    train = _Split("training", parts, stores, [~one for one in held])
    validation: _Split | None = None
    if validation_parts:
        validation = _validation(validation_parts, tokenizer, reading)
    elif any(one.any() for one in held):
        # The faulty rows of a source are told with its training rows.
        validation = _Split("validation", parts, stores, held, counts_faults=False)
    # A loss that takes weights takes them of both.
    is_weighted = train.is_weighted or (validation is not None and validation.is_weighted)
    making = _Making(layout, tokenizer.eos_id, is_weighted, transform)
    return Datasets(
        train=making.rows(train, temperature),
        validation=None if validation is None else making.rows(validation),
        tokenizer=tokenizer,
    )


def build_stream(
    part: Part,
    *,
    tokenizer: Tokenizer | TrainableTokenizer | None,
    layout: Layout,
    reading: Reading,
    block_documents: int,
    mesh_context: MeshContext,
    validation_parts: Sequence[Part] = (),
    transform: ImageTransform | None = None,
) -> Datasets:
    """Rows that are encoded and packed while the run reads them, by blocks of `block_documents` of each data rank.

    Validation data is built as `build_datasets` does. Raises `ArgumentError` and `InputError` likewise.
    """
    if tokenizer is None:
        raise ArgumentError("tokenizer", "this dataset needs a tokenizer", "add `tokenizer: {name: bytes}`")
    if isinstance(tokenizer, TrainableTokenizer):
        raise ArgumentError("tokenizer", "a tokenizer can't be learned from streamed data", "name a finished one")
    if not isinstance(part.source, StreamingSource):
        raise ArgumentError("streaming", f"{part.source.name!r} can't be streamed", "remove it")
    encoder = part.encoder(tokenizer)
    if encoder.has_weights:
        _require_free_name(encoder.columns)
    stream = BlockStream(part.source, encoder, block_documents, mesh_context.dp_rank, mesh_context.dp_size)
    validation: WithEmptyRow | None = None
    if validation_parts:
        split = _validation(validation_parts, tokenizer, reading)
        validation = _Making(layout, tokenizer.eos_id, encoder.has_weights, transform).rows(split)
    train = WithEmptyRow(StreamingRows(stream, layout, reading, eos_id=tokenizer.eos_id, transform=transform))
    return Datasets(train=train, validation=validation, tokenizer=tokenizer)


@dataclass(frozen=True, eq=False)
class _Split:
    """The selected documents of each part."""

    role: str
    parts: Sequence[Part]
    stores: Sequence[TokenStore | MegatronStore]
    selected: Sequence[NDArray[np.bool_]]
    counts_faults: bool = True

    @property
    def is_weighted(self) -> bool:
        """Whether targets of some part count for something else than 1; then the rows of all parts say so."""
        return any(part.loss_weight != 1 for part in self.parts) or any(one.has_weights for one in self.stores)


def _store(part: Part, tokenizer: Tokenizer, reading: Reading) -> TokenStore | MegatronStore:
    if isinstance(part.source, MegatronSource):
        return part.source.store(tokenizer, reading.cache_dir)
    return build_tokens(part.source, part.encoder(tokenizer), reading)


def _stores(parts: Sequence[Part], tokenizer: Tokenizer, reading: Reading) -> list[TokenStore | MegatronStore]:
    return [_store(part, tokenizer, reading) for part in parts]


def _validation(parts: Sequence[Part], tokenizer: Tokenizer, reading: Reading) -> _Split:
    """All documents of the parts."""
    stores = _stores(parts, tokenizer, reading)
    return _Split("validation", parts, stores, [np.ones(len(store.lengths), dtype=bool) for store in stores])


def _held_out(stores: Sequence[TokenStore | MegatronStore], fraction: float) -> list[NDArray[np.bool_]]:
    """For each store, which of its documents are held out: chosen among the documents of all."""
    hashes = np.concatenate([store.hashes for store in stores])
    has_text = np.concatenate([store.lengths > 0 for store in stores])
    ends = np.cumsum([len(store.lengths) for store in stores])
    return np.split(held_out(hashes, has_text, fraction), ends[:-1])


@dataclass(frozen=True)
class _Making:
    """How documents become rows: the layout, the end token, whether targets have weights, and what reads images."""

    layout: Layout
    eos_id: int
    is_weighted: bool
    transform: ImageTransform | None = None

    def rows(self, split: _Split, temperature: float | None = None) -> WithEmptyRow:
        """The split's rows; every part has some in training."""
        packed: list[PackedRows] = []
        names: list[str] = []
        for part, store, chosen in zip(split.parts, split.stores, split.selected, strict=True):
            images = None if store.images is None else store.images.records
            plan = plan_rows(store.lengths, self.layout, chosen, store.trained, images)
            if split.counts_faults:
                plan = replace(plan, report=replace(plan.report, faulty_rows=store.faulty_rows))
            if plan.num_rows == 0 and (split.role == "training" or len(split.parts) == 1):
                raise InputError(_nothing_to_predict(split.role, part, plan.report, self.layout))
            if plan.num_rows == 0:
                continue
            packed.append(self._packed(part, store, plan))
            names.append(part.name)
        if not packed:
            raise InputError(f"the {split.role} data has nothing to predict in any of its {len(split.parts)} sources")
        if names == [""]:
            return WithEmptyRow(packed[0])
        mixture = _mixture(split.parts, packed, temperature) if split.role == "training" else None
        return WithEmptyRow(MixedRows(packed, names, mixture))

    def _packed(self, part: Part, store: TokenStore | MegatronStore, plan: PackingPlan) -> PackedRows:
        loss_weight: float | None = None
        if self.is_weighted:
            _require_free_name(store.columns)
            _require_weights_held(part, store)
            loss_weight = part.loss_weight
        return PackedRows(store, plan, eos_id=self.eos_id, loss_weight=loss_weight, transform=self.transform)


def _require_free_name(columns: Sequence[str]) -> None:
    if WEIGHTS in columns:
        raise ArgumentError("columns", f"{WEIGHTS!r} is what the weights of tokens and sources are called")


def _require_weights_held(part: Part, store: TokenStore | MegatronStore) -> None:
    """Refuse a loss weight that, multiplied by some token's own, would be infinite or 0 in the rows."""
    path = f"sources.{part.name}.loss_weight"
    if (fault := float32_fault(part.loss_weight)) is not None:
        raise ArgumentError(path, fault)
    if part.loss_weight == 1 or store.weights is None:
        return
    own = store.weights[store.weights > 0]
    for weight in (float(own.min()), float(own.max())) if len(own) else ():
        with np.errstate(over="ignore", under="ignore"):
            product = np.float32(weight) * np.float32(part.loss_weight)
        if product == 0 or not np.isfinite(product):
            raise ArgumentError(path, f"times the weight {weight:g} of a token is {product:g} in float32")


def _mixture(parts: Sequence[Part], packed: Sequence[PackedRows], temperature: float | None) -> Mixture | None:
    names, sizes = [part.name for part in parts], [len(rows) for rows in packed]
    weights = [part.weight for part in parts if part.weight is not None]
    if temperature is None and not weights:
        return None
    return Mixture.of(names, sizes, weights=weights or None, temperature=temperature)


def _nothing_to_predict(role: str, part: Part, report: DataReport, layout: Layout) -> str:
    source = f" of the source {part.name!r}" if part.name else ""
    reasons = [f"{report.empty_documents} documents without text", f"{report.short_documents} of one token"]
    if report.dropped_documents:
        reasons.append(f"{report.dropped_documents} longer than max_seq_len {layout.max_seq_len}, which are dropped")
    if report.pixel_documents:
        most = f"max_row_pixels {layout.max_row_pixels:,}"
        reasons.append(f"{report.pixel_documents} of more pixels than {most}, which are dropped")
    if report.untargeted_documents:
        reasons.append(f"{report.untargeted_documents} without a trained token{layout.told_of_cuts}")
    if report.faulty_rows:
        reasons.append(f"{report.faulty_rows} faulty rows")
    return f"the {role} data{source} has nothing to predict: {', '.join(reasons)}, and no others"


def _learned(
    tokenizer: TrainableTokenizer, parts: Sequence[Part], validation_fraction: float, reading: Reading
) -> Tokenizer:
    texts: list[tuple[Source, RowText]] = []
    for part in parts:
        if part.text is None or isinstance(part.source, MegatronSource):
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
