from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hp_core.data.fingerprint import fingerprint
from hp_core.data.sources import Document


@dataclass
class ListSource:
    texts: list[str]
    name: str = "a list"
    passes: int = field(default=0)

    @property
    def fingerprint(self) -> str:
        return fingerprint("list", *self.texts)

    def documents(self) -> Iterator[Document]:
        self.passes += 1
        return (Document(text, f"list:{number}") for number, text in enumerate(self.texts, start=1))


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
class LearnedTokenizer:
    """Remembers what it was trained on."""

    fingerprint: str = "learned"
    seen: list[str] = field(default_factory=list)

    def train(self, documents: Iterable[str], *, data_fingerprint: str, cache_dir: Path) -> CharTokenizer:
        self.seen = list(documents)
        return CharTokenizer()
