"""Pairs of answers to a prompt from files, a pair a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from hp_core import ArgumentError, Datasets, InputError, Tokenizer
from hp_core.data.fingerprint import document_hash, fingerprint
from hp_core.data.protocols import DataReport
from hp_core.data.reading import Faults
from hp_core.data.sources import FileSource, expand_files
from hp_core.data.split import held_out
from hp_dpo.encoding import FIELDS, PairEncoder, TokenPair

CHOSEN, REJECTED = 1, 2


class PairRows:
    """A row for each pair: the prompt and the chosen answer, the prompt and the rejected one, then padding.

    The targets are the tokens of the answers; `answers` says whose target each position has.
    """

    def __init__(self, pairs: Sequence[TokenPair], max_seq_len: int, pad_id: int, num_dropped: int = 0) -> None:
        self._pairs, self._pad_id, self.max_seq_len = pairs, pad_id, max_seq_len
        contents = (str((one.prompt, one.chosen, one.rejected)) for one in pairs)
        self.fingerprint = fingerprint("preferences", max_seq_len, pad_id, *contents)
        num, tokens = len(pairs), sum(one.num_tokens for one in pairs)
        targets = sum(label >= 0 for one in pairs for _, label in (*one.chosen, *one.rejected))
        self.report = DataReport(num, tokens, targets, num, num * max_seq_len - tokens, dropped_documents=num_dropped)

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        pair, size = self._pairs[index], self.max_seq_len
        row = {name: np.full(size, fill) for name, fill in (("input_ids", self._pad_id), ("labels", -100))}
        answers, positions = np.zeros(size, dtype=np.int64), np.arange(size) - pair.num_tokens
        begin, first = 0, len(pair.prompt) - 1
        for which, answer in ((CHOSEN, pair.chosen), (REJECTED, pair.rejected)):
            ids = [*pair.prompt, *(one for one, _ in answer)]
            end = begin + len(ids)
            row["input_ids"][begin:end] = ids
            row["labels"][begin + first : end - 1] = [label for _, label in answer]
            answers[begin + first : end - 1] = which
            positions[begin:end] = np.arange(len(ids))
            begin = end
        is_padding = np.arange(size) >= begin
        return {"index": index, **row, "answers": answers, "position_ids": positions, "is_padding": is_padding}


def preferences(
    *,
    files: Annotated[
        str | list[str], Field(description="Paths, folders or globs of .jsonl, .json, .csv, .parquet and .arrow files.")
    ],
    max_seq_len: Annotated[
        int, Field(ge=2, description="Tokens in a row: of a pair, the prompt twice and both answers.")
    ] = 1024,
    too_long: Annotated[
        Literal["error", "drop"], Field(description="What becomes of longer pairs: an error, or they are left out.")
    ] = "error",
    chat_template: Annotated[
        str | None, Field(description="A chat template, as text or a .jinja file, instead of the tokenizer's.")
    ] = None,
    validation_fraction: Annotated[
        float, Field(ge=0, lt=1, description="The share of prompts to evaluate on, chosen by their text alone.")
    ] = 0.0,
    tokenizer: Tokenizer,
) -> Datasets:
    """Read pairs of answers: `prompt`, `chosen` and `rejected`, as texts or as lists of messages.

    Raises:
        ArgumentError: no file is there, or a pair is too long.
        InputError: rows that are no pairs, with file and line, all at once.
    """
    encoder = PairEncoder(tokenizer, chat_template)
    source = FileSource(expand_files(files))
    pairs, faults = [], Faults(source.name)
    for row in source.rows(FIELDS):
        try:
            if isinstance(row, InputError):
                raise row
            pairs.append(encoder.encode(row))
        except InputError as error:
            faults.add(error)
    faults.require_none()
    if encoder.is_template_unused:
        raise ArgumentError("chat_template", "has no effect: the files hold texts, no messages", "leave it out")
    short = [one for one in pairs if one.num_tokens <= max_seq_len]
    if len(short) < len(pairs) and (too_long == "error" or not short):
        longest = max(pairs, key=lambda one: one.num_tokens)
        message = f"{len(pairs) - len(short)} of {len(pairs)} pairs are longer than {max_seq_len} tokens"
        told = f"{message}; the longest, {longest.location}, has {longest.num_tokens}, its prompt {len(longest.prompt)}"
        raise ArgumentError("max_seq_len", told, f"write max_seq_len: {longest.num_tokens}, or too_long: drop")
    hashes = np.array([document_hash(np.array(one.prompt).tobytes()) for one in short], dtype=np.uint64)
    is_held_out = held_out(hashes, np.ones(len(short), dtype=bool), validation_fraction)
    train, validation = ([short[i] for i in np.flatnonzero(chosen)] for chosen in (~is_held_out, is_held_out))
    return Datasets(
        PairRows(train, max_seq_len, tokenizer.eos_id, len(pairs) - len(short)),
        PairRows(validation, max_seq_len, tokenizer.eos_id) if validation else None,
        tokenizer=encoder.tokenizer,
    )
