"""Text from files or the Hub, packed into rows for next-token prediction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from hp_core.data.build import Part, build_data
from hp_core.data.cache import cache_directory
from hp_core.data.columns import RowColumns
from hp_core.data.fields import RowText
from hp_core.data.layout import Layout
from hp_core.data.protocols import Datasets, MeshContext, Tokenizer, TrainableTokenizer
from hp_core.data.reading import Reading
from hp_core.data.sources import FileSource, expand_files
from hp_core.data.text import TextEncoder
from hp_core.errors import ArgumentError
from hp_plugins.datasets.arguments import (
    BlockDocuments,
    CacheDir,
    FaultyRows,
    LongDocuments,
    MaxErrors,
    MaxSeqLen,
    NumProc,
    PackingRule,
    Streaming,
    ValidationFraction,
    block_size,
)
from hp_plugins.datasets.sources import (
    Files,
    HubConfig,
    HubId,
    Megatron,
    Split,
    Temperature,
    Template,
    TextField,
    TextSource,
    parts_of,
    rows_of,
    tokens_of,
)


def text(
    files: Files = None,
    hub_id: HubId = None,
    hub_config: HubConfig = None,
    split: Split = None,
    megatron: Megatron = None,
    field: TextField = None,
    template: Template = None,
    sources: Annotated[
        dict[str, TextSource] | None,
        Field(description="Several sources by name, instead of files: files, hub_id or megatron, weight and more."),
    ] = None,
    temperature: Temperature = None,
    max_seq_len: MaxSeqLen = 1024,
    packing: PackingRule = "sequential",
    length_policy: LongDocuments = "split",
    validation_fraction: ValidationFraction = 0.0,
    validation_files: Annotated[
        str | list[str] | None, Field(description="Files to validate on, instead of a fraction.")
    ] = None,
    cache_dir: CacheDir = None,
    columns: Annotated[
        list[str] | None,
        Field(description="Numeric fields of a row that the loss takes: one number for each document."),
    ] = None,
    num_proc: NumProc = None,
    on_error: FaultyRows = "fail",
    max_errors: MaxErrors = None,
    streaming: Streaming = False,
    block_documents: BlockDocuments = None,
    *,
    tokenizer: Tokenizer | TrainableTokenizer | None,
    mesh_context: MeshContext | None = None,
) -> Datasets:
    """Documents, each closed by EOS, in rows of `max_seq_len` tokens.

    `files` are paths, directories or globs, from the working directory, of `.txt` (a file is a document), `.jsonl`,
    `.ndjson`, `.json`, `.csv`, `.parquet` and `.arrow` files (a row is a document). A directory stands for all such
    files in it and below, sorted. Or `hub_id`, with `hub_config` and `split` (default
    `train`), names a data set on the Hub. A row's text is its `field` (default `text`) or a `template` over its
    fields, such as `"{question}\\n{answer}"`. Or `megatron` names files of tokens, whose documents are used as they
    are.

    `sources` are several of these, each with a name, and keys of its own for all of this. With a `weight` for each, or
    a `temperature`, an epoch takes as many rows as there are, in these shares: of each source, all rows come before
    one comes again. Without, an epoch takes every row once. `loss_weight` is what a source's targets count for, for a
    loss that weighs tokens by the column `token_weights`. Metrics count the rows and targets of each source.

    Documents lie end to end and are cut where a row ends, unless `packing` or `length_policy` says otherwise:
    `sequential` puts consecutive documents into a row, `best_fit` those that fill it best, `none` only one. Longer
    documents are `split` into rows, and no target is lost; or `drop` leaves them out, `truncate` keeps their first
    `max_seq_len` tokens, and `truncate_eos` puts the end token in the place of the last of these. All of this is
    counted in the first lines of a run and its manifest.

    Validation documents come from `validation_files`, or are a `validation_fraction` of the documents, chosen by
    their text. Token ids are cached in `cache_dir` (default `$HP_CACHE_DIR`, else the user's cache directory).

    `columns` are numeric fields, one number a document, for a loss that declares them. Each becomes a float32 array of
    the rows that holds the document's number at each of its positions and 0 in padding. Whole numbers are exact up to
    2**24 and refused where float32 would change them; other numbers are rounded to float32. A missing or null field,
    a list, a bool, NaN and infinity are faults of the row.

    The first faulty row ends the run with its file, line and reason; `on_error: skip` leaves out up to `max_errors`
    of them, counts them and says what is wrong with the first. `num_proc` processes encode, the run's own among them;
    their number changes nothing but the time.

    With `streaming`, files or a data set on the Hub are encoded while the run reads them: documents (lines of JSON
    lines, or else rows) are dealt to the data ranks in turn, and each rank packs `block_documents` of its own at a
    time and shuffles their rows. Workers of the data loader encode ahead. A resumed run continues at the exact row, on
    as many data ranks.
    """
    block = block_size(
        streaming,
        block_documents,
        validation_fraction=validation_fraction,
        beforehand={"num_proc": num_proc, "cache_dir": cache_dir} if validation_files is None else {},
        unstreamed={"megatron": megatron, "sources": sources, "temperature": temperature},
    )
    numbers = RowColumns.of(columns)
    alone: dict[str, Any] = {"files": files, "hub_id": hub_id, "hub_config": hub_config, "split": split}
    alone |= {"megatron": megatron, "field": field, "template": template}
    parts = parts_of(TextSource, sources, temperature, alone, partial(_part, numbers))
    validation_parts = []
    if validation_files is not None:
        validation_parts.append(_validation_part(validation_files, parts, numbers))
    return build_data(
        parts,
        tokenizer=tokenizer,
        layout=Layout(max_seq_len, packing, length_policy),
        reading=Reading(cache_directory(cache_dir), num_proc, on_error, max_errors),
        validation_fraction=validation_fraction,
        validation_parts=validation_parts,
        temperature=temperature,
        block_documents=block,
        mesh_context=mesh_context,
    )


def _part(numbers: RowColumns, name: str, spec: TextSource, within: str) -> Part:
    row_text = _row_text(spec, within)
    encoder = partial(TextEncoder, text=row_text, numbers=numbers)
    if spec.megatron is None:
        return Part(name, rows_of(spec, within=within), encoder, row_text, spec.weight, spec.loss_weight)
    if numbers.names:
        raise ArgumentError("columns", "files of tokens have no fields to take numbers from")
    return Part(name, tokens_of(spec, within=within), encoder, None, spec.weight, spec.loss_weight)


def _validation_part(files: str | list[str], parts: Sequence[Part], numbers: RowColumns) -> Part:
    """Files whose text is made as that of the training sources."""
    row_texts = {part.text for part in parts if part.text is not None} or {RowText.of()}
    if len(row_texts) > 1:
        hint = "use validation_fraction, or give all sources the same field or template"
        raise ArgumentError("validation_files", "their text can't be told: that of the sources differs", hint)
    (row_text,) = row_texts
    source = FileSource(expand_files(files, argument="validation_files"))
    return Part("", source, partial(TextEncoder, text=row_text, numbers=numbers), row_text)


def _row_text(spec: TextSource, within: str) -> RowText:
    try:
        return RowText.of(spec.field, spec.template)
    except ArgumentError as error:
        raise ArgumentError(f"{within}{error.path}", error.message, error.hint) from error
