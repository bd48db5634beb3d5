"""Text from files or the Hub, packed into rows for next-token prediction."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from pydantic import Field

from hp_core.data.build import Part, build_datasets
from hp_core.data.cache import cache_directory
from hp_core.data.columns import RowColumns
from hp_core.data.fields import RowText
from hp_core.data.hub import HubSource
from hp_core.data.layout import Layout
from hp_core.data.protocols import Datasets, Tokenizer, TrainableTokenizer
from hp_core.data.reading import Reading
from hp_core.data.records import Source
from hp_core.data.sources import FileSource, expand_files
from hp_core.data.text import TextEncoder
from hp_core.errors import ArgumentError
from hp_plugins.datasets.arguments import (
    CacheDir,
    FaultyRows,
    LongDocuments,
    MaxErrors,
    MaxSeqLen,
    PackingRule,
    ValidationFraction,
)


def text(
    files: Annotated[
        str | list[str] | None,
        Field(description="Paths, folders or globs of .txt, .jsonl, .json, .csv, .parquet and .arrow files."),
    ] = None,
    hub_id: Annotated[str | None, Field(description="A data set on the Hub, instead of files.")] = None,
    hub_config: Annotated[str | None, Field(description="Configuration of the Hub data set.")] = None,
    split: Annotated[str | None, Field(description="Split of the Hub data set; null is `train`.")] = None,
    field: Annotated[str | None, Field(description="The field of a row that is the text; null is `text`.")] = None,
    template: Annotated[
        str | None, Field(description="A text made of several fields, such as `{question} {answer}`.")
    ] = None,
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
    on_error: FaultyRows = "fail",
    max_errors: MaxErrors = None,
    *,
    tokenizer: Tokenizer | TrainableTokenizer | None,
) -> Datasets:
    """Documents, each closed by EOS, in rows of `max_seq_len` tokens.

    `files` are paths, directories or globs, from the working directory, of `.txt` (a file is a document), `.jsonl`,
    `.ndjson`, `.json`, `.csv`, `.parquet` and `.arrow` files (a row is a document). A directory stands for all such
    files in it and below, sorted. Or `hub_id`, with `hub_config` and `split` (default
    `train`), names a data set on the Hub. A row's text is its `field` (default `text`) or a `template` over its
    fields, such as `"{question}\\n{answer}"`.

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
    of them, counts them and says what is wrong with the first.
    """
    row_text = RowText.of(field, template)
    encoder = partial(TextEncoder, text=row_text, numbers=RowColumns.of(columns))
    source = _source(files, (hub_id, hub_config, split))
    validation_sources: list[Source] = []
    if validation_files is not None:
        validation_sources.append(FileSource(expand_files(validation_files, argument="validation_files")))
    return build_datasets(
        [Part("", source, encoder, row_text)],
        tokenizer=tokenizer,
        layout=Layout(max_seq_len, packing, length_policy),
        reading=Reading(cache_directory(cache_dir), None, on_error, max_errors),
        validation_fraction=validation_fraction,
        validation_parts=[Part("", one, encoder, row_text) for one in validation_sources],
    )


def _source(files: str | list[str] | None, hub: tuple[str | None, str | None, str | None]) -> Source:
    """The files, or the Hub data set given as (id, configuration, split); exactly one of them."""
    hub_id, config, split = hub
    if files is not None and hub_id is None:
        if config is not None or split is not None:
            raise ArgumentError(
                "split" if split is not None else "hub_config", "has no effect on files; it needs hub_id"
            )
        return FileSource(expand_files(files))
    if hub_id is None or files is not None:
        raise ArgumentError("files", "give either files or hub_id")
    return HubSource(hub_id, config, split or "train")
