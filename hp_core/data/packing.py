"""Documents laid end to end and cut into rows of equal length, by a plan over their lengths alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from hp_core.data.fingerprint import fingerprint
from hp_core.data.protocols import IGNORED_LABEL, DataReport, Sample
from hp_core.data.tokens import TokenStore
from hp_core.errors import ArgumentError

MIN_SEQ_LEN = 2
_RULE_VERSION = 1


Packing = Literal["best_fit", "sequential", "none"]
LengthPolicy = Literal["drop", "truncate", "truncate_eos", "split"]


@dataclass(frozen=True)
class Layout:
    """How documents become rows of `max_seq_len` tokens.

    Raises `ArgumentError` for rows that have no room for a token and its target.
    """

    max_seq_len: int
    packing: Packing = "sequential"
    length_policy: LengthPolicy = "split"

    def __post_init__(self) -> None:
        if self.max_seq_len < MIN_SEQ_LEN:
            raise ArgumentError("max_seq_len", f"{self.max_seq_len} is below {MIN_SEQ_LEN}, a token and its target")


@dataclass(frozen=True, eq=False)
class PackingPlan:
    """Which tokens of a token store each row holds.

    The kept documents form one stream. `ends` are their ends in the stream and `shifts` how far each lies further
    on in the store; `documents` are their numbers there. Row `i` holds positions `i * max_seq_len` and on, up to
    `num_tokens` in the last row.
    """

    max_seq_len: int
    num_tokens: int
    lengths: NDArray[np.int64]
    ends: NDArray[np.int64]
    shifts: NDArray[np.int64]
    documents: NDArray[np.int64]
    report: DataReport

    @property
    def num_rows(self) -> int:
        """How many rows there are; all but the last are full."""
        return -(-self.num_tokens // self.max_seq_len)


def plan_rows(lengths: NDArray[np.int64], layout: Layout, selected: NDArray[np.bool_] | None = None) -> PackingPlan:
    """Plan rows of `layout` over the `selected` documents (default: all) of the given lengths.

    Documents of 0 (empty) or 1 token (nothing to predict) are left out and counted. So is the very last token
    if it would be alone in the last row: its document lies in the row before, where it is still a target.
    """
    max_seq_len = layout.max_seq_len
    lengths = np.asarray(lengths, dtype=np.int64)
    chosen = np.ones(len(lengths), dtype=bool) if selected is None else selected
    kept = chosen & (lengths >= 2)
    store_starts = (np.cumsum(lengths) - lengths)[kept]
    kept_lengths = lengths[kept]
    ends = np.cumsum(kept_lengths)
    stream = int(ends[-1]) if len(ends) else 0
    dropped = int(stream % max_seq_len == 1)
    num_tokens = stream - dropped
    num_rows = -(-num_tokens // max_seq_len)
    report = DataReport(
        documents=len(kept_lengths),
        empty_documents=int(np.count_nonzero(chosen & (lengths == 0))),
        short_documents=int(np.count_nonzero(chosen & (lengths == 1))),
        tokens=num_tokens,
        targets=stream - len(kept_lengths),
        rows=num_rows,
        padding_tokens=num_rows * max_seq_len - num_tokens,
        dropped_tokens=dropped,
    )
    shifts = store_starts - (ends - kept_lengths)
    return PackingPlan(max_seq_len, num_tokens, kept_lengths, ends, shifts, np.flatnonzero(kept), report)


class PackedRows:
    """The rows of a plan, read from the memory-mapped token store when asked for.

    In each row `labels[t]` is the token after position `t` in the same document, even where that token begins
    the next row; a document's last token has none. `position_ids` restart with every piece of a document. The
    padding behind the last row's tokens is a piece of its own, with `pad_id` as input and no targets. Each column
    of the store is a float32 array that holds, at each position of a document, the document's value, and 0 in padding.
    """

    def __init__(self, store: TokenStore, plan: PackingPlan, *, pad_id: int) -> None:
        self.store = store
        self.plan = plan
        self.pad_id = pad_id
        self.max_seq_len = plan.max_seq_len
        self.report = plan.report
        self.fingerprint = fingerprint(
            "packed rows", _RULE_VERSION, store.key, plan.max_seq_len, plan.lengths.tobytes(), plan.shifts.tobytes()
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """The arrays that its rows have beside those of every row."""
        return self.store.columns

    def __len__(self) -> int:
        return self.plan.num_rows

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        plan = self.plan
        begin = index * plan.max_seq_len
        end = min(begin + plan.max_seq_len, plan.num_tokens)
        first, last = np.searchsorted(plan.ends, (begin, end - 1), side="right")
        ends = plan.ends[first : last + 1]
        starts = np.maximum(ends - plan.lengths[first : last + 1], begin)
        sizes = np.minimum(ends, end) - starts
        stream = np.arange(begin, end)
        stored = stream + np.repeat(plan.shifts[first : last + 1], sizes)
        has_target = stream + 1 < np.repeat(ends, sizes)

        input_ids = np.full(plan.max_seq_len, self.pad_id, dtype=np.int64)
        labels = np.full(plan.max_seq_len, IGNORED_LABEL, dtype=np.int64)
        position_ids = np.arange(plan.max_seq_len) - (end - begin)
        input_ids[: end - begin] = self.store.tokens[stored]
        labels[: end - begin][has_target] = self.store.tokens[stored[has_target] + 1]
        position_ids[: end - begin] = stream - np.repeat(starts, sizes)
        sample = {
            "index": int(index),
            "input_ids": input_ids,
            "labels": labels,
            "position_ids": position_ids,
            "is_padding": np.arange(plan.max_seq_len) >= end - begin,
        }
        for number, name in enumerate(self.store.columns):
            column = np.zeros(plan.max_seq_len, dtype=np.float32)
            column[: end - begin] = np.repeat(self.store.values[plan.documents[first : last + 1], number], sizes)
            sample[name] = column
        return cast(Sample, sample)
