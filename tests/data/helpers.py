from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hp_core.data.build import Part, build_datasets
from hp_core.data.columns import RowColumns
from hp_core.data.fields import RowText
from hp_core.data.fingerprint import fingerprint
from hp_core.data.packing import Layout
from hp_core.data.protocols import Datasets, Tokenizer, TrainableTokenizer
from hp_core.data.reading import Reading
from hp_core.data.records import Place, Row, Source
from hp_core.data.text import TextEncoder
from hp_core.data.tokens import TokenStore, build_tokens
from hp_core.errors import InputError


@dataclass
class ListSource:
    texts: list[str]
    name: str = "a list"
    passes: int = field(default=0)

    @property
    def fingerprint(self) -> str:
        return fingerprint("list", *self.texts)

    def rows(self, fields: Sequence[str]) -> Iterator[Row | InputError]:
        self.passes += 1
        for number, text in enumerate(self.texts, start=1):
            yield Row(f"list:{number}", {"text": text}, place=Place(0, number))

    def locate(self, place: Place) -> str:
        return f"list:{place.number}"


@dataclass
class CharTokenizer:
    """Ids are code points, so tests can read them; EOS is 0."""

    vocab_size: int = 1000
    name: str = "characters"
    eos_id: int = 0
    calls: int = field(default=0)

    @property
    def fingerprint(self) -> str:
        return fingerprint("characters", self.vocab_size)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        self.calls += 1
        return [[ord(character) for character in text] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(value) for value in ids if value)

    def save(self, directory: Path) -> None:
        raise NotImplementedError


@dataclass
class SlowTokenizer(CharTokenizer):
    """Takes its time, and tells in a file which processes it was in."""

    seconds: float = 0.0
    log: str = ""
    name: str = "slow characters"

    @property
    def fingerprint(self) -> str:
        return "slow"

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        time.sleep(self.seconds)
        if self.log:
            with Path(self.log).open("a") as file:
                file.write(f"{os.getpid()}\n")
        return super().encode_batch(texts)


@dataclass
class LearnedTokenizer:
    """Remembers what it was trained on."""

    fingerprint: str = "learned"
    seen: list[str] = field(default_factory=list)

    def train(self, documents: Iterable[str], *, data_fingerprint: str, cache_dir: Path) -> CharTokenizer:
        self.seen = list(documents)
        return CharTokenizer()


def text_encoder(tokenizer: Tokenizer, *columns: str) -> TextEncoder:
    return TextEncoder(tokenizer, RowText.of(), RowColumns.of(columns))


def store_of(source: Source, tokenizer: Tokenizer, cache_dir: Path, *columns: str) -> TokenStore:
    """The source's texts, encoded."""
    return build_tokens(source, text_encoder(tokenizer, *columns), Reading(cache_dir, num_proc=1))


def text_part(source: Source, *columns: str, name: str = "") -> Part:
    return Part(name, source, lambda tokenizer: text_encoder(tokenizer, *columns), RowText.of())


def text_datasets(
    source: Source,
    *,
    tokenizer: Tokenizer | TrainableTokenizer | None,
    max_seq_len: int,
    cache_dir: Path,
    validation_source: Source | None = None,
    columns: Sequence[str] = (),
    **options: Any,
) -> Datasets:
    """One source of texts as packed rows."""
    validation_parts = [] if validation_source is None else [text_part(validation_source, *columns)]
    return build_datasets(
        [text_part(source, *columns)],
        tokenizer=tokenizer,
        layout=Layout(max_seq_len),
        reading=Reading(cache_dir, num_proc=1),
        validation_parts=validation_parts,
        **options,
    )
