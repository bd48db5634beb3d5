"""Arguments that the data sets share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hp_core.data.layout import LengthPolicy, Packing
from hp_core.data.reading import OnError

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
