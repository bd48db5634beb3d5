"""Arguments that the data sets share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from hp_core.data.layout import LengthPolicy, Packing
from hp_core.data.reading import OnError
from hp_core.data.streaming import DEFAULT_BLOCK_DOCUMENTS
from hp_core.errors import ArgumentError

MaxSeqLen = Annotated[int, Field(ge=2, description="Tokens in a row.")]
PackingRule = Annotated[Packing, Field(description="Which documents share a row.")]
LongDocuments = Annotated[LengthPolicy, Field(description="What becomes of documents longer than `max_seq_len`.")]
ValidationFraction = Annotated[
    float, Field(ge=0, lt=1, description="Share of the data that is held out, chosen by its text.")
]
CacheDir = Annotated[
    str | None, Field(description="Folder of the token cache; null is `$HP_CACHE_DIR` or the user's cache folder.")
]
NumProc = Annotated[
    Annotated[int, Field(ge=1)] | None, Field(description="Processes that encode; null is one for each usable CPU.")
]
FaultyRows = Annotated[OnError, Field(description="Whether a faulty row ends the run or is left out.")]
MaxErrors = Annotated[
    Annotated[int, Field(ge=1)] | None,
    Field(description="Faulty rows of a source that `on_error: skip` leaves out at most; null is 100."),
]
Streaming = Annotated[
    bool, Field(description="Encode and pack while the run reads, without a cache: for data that is too large for one.")
]
BlockDocuments = Annotated[
    Annotated[int, Field(ge=1)] | None,
    Field(description="Documents of a data rank that are packed and shuffled together; null is 10,000."),
]


def block_size(
    streaming: bool,
    block_documents: int | None,
    *,
    validation_fraction: float,
    beforehand: Mapping[str, object],
    unstreamed: Mapping[str, object],
) -> int | None:
    """How many documents a block of a stream has; None for data that isn't streamed.

    `beforehand` are arguments, by name, that say how data is encoded before a run: none where validation files are.
    `unstreamed` are those that a stream can't have. Raises `ArgumentError` for those that are given, and for
    `block_documents` without a stream.
    """
    if not streaming:
        if block_documents is not None:
            raise ArgumentError("block_documents", "has no effect without streaming", "write streaming: true")
        return None
    if validation_fraction:
        hint = "name validation_files, or leave streaming out"
        raise ArgumentError("validation_fraction", "none of streamed data can be held out, as it isn't known", hint)
    for name, value in beforehand.items():
        if value is not None:
            hint = "set dataloader.num_workers" if name == "num_proc" else "leave it out"
            raise ArgumentError(name, "has no effect on streamed data", hint)
    given = next((name for name, value in unstreamed.items() if value is not None), None)
    if given is not None:
        raise ArgumentError(given, "can't be streamed", "leave streaming out, or stream one set of files or hub_id")
    return DEFAULT_BLOCK_DOCUMENTS if block_documents is None else block_documents
