"""Arguments that the data sets share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MaxSeqLen = Annotated[int, Field(ge=2, description="Tokens in a row.")]
ValidationFraction = Annotated[
    float, Field(ge=0, lt=1, description="Share of the data that is held out, chosen by its text.")
]
CacheDir = Annotated[
    str | None, Field(description="Folder of the token cache; null is `$HP_CACHE_DIR` or the user's cache folder.")
]
