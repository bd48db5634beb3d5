"""How documents are to become rows: their length, the rule for packing, and what becomes of long documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hp_core.errors import ArgumentError

MIN_SEQ_LEN = 2

Packing = Literal["best_fit", "sequential", "none"]
LengthPolicy = Literal["drop", "truncate", "truncate_eos", "split"]


@dataclass(frozen=True)
class Layout:
    """How documents become rows of `max_seq_len` tokens.

    `length_policy` is for documents of more tokens: leave them out (`drop`), keep the first `max_seq_len`
    (`truncate`), the same with the last of these replaced by the end token if it is trained (`truncate_eos`), or cut
    them into pieces of which each still has the next token as its last target (`split`).

    `packing` is what shares a row: as many pieces as best-fit decreasing puts there (`best_fit`), consecutive ones
    (`sequential`: with `split` an endless stream that is cut at the ends of rows, otherwise what doesn't fit begins a
    new row), or one alone (`none`).

    `max_row_pixels` is how many pixels of images a row has at most, None for as many as its tokens stand for. A
    document of more is too long for a row, and `length_policy` is for it, too.

    Raises `ArgumentError` for rows that have no room for a token and its target.
    """

    max_seq_len: int
    packing: Packing = "sequential"
    length_policy: LengthPolicy = "split"
    max_row_pixels: int | None = None

    def __post_init__(self) -> None:
        if self.max_seq_len < MIN_SEQ_LEN:
            raise ArgumentError("max_seq_len", f"{self.max_seq_len} is below {MIN_SEQ_LEN}, a token and its target")

    @property
    def told_of_cuts(self) -> str:
        """What may have cut the targets off documents, to be told with those that have none left."""
        if not self.length_policy.startswith("truncate"):
            return ""
        pixels = "" if self.max_row_pixels is None else f" and max_row_pixels {self.max_row_pixels:,}"
        return f" within max_seq_len {self.max_seq_len:,}{pixels}"

    @property
    def is_stream(self) -> bool:
        """Whether documents are cut wherever a row ends."""
        return self.packing == "sequential" and self.length_policy == "split"
