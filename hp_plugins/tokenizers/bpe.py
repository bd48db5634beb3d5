"""Byte-level BPE, learned from the training documents when the run first needs it."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field
from tokenizers import Tokenizer as FastBackend
from tokenizers import decoders, models, pre_tokenizers, trainers

from hp_core.data.cache import build_once
from hp_core.data.fingerprint import document_hash, fingerprint
from hp_core.data.protocols import Tokenizer, TrainableTokenizer
from hp_core.errors import ArgumentError
from hp_plugins.tokenizers.byte_level import EOS_TOKEN
from hp_plugins.tokenizers.fast import FastTokenizer

_RULE_VERSION = 1
_FILE = "tokenizer.json"
_MIN_VOCAB_SIZE = 257
_log = logging.getLogger(__name__)


class ByteLevelBpe:
    """The settings of a BPE that is yet to be learned: GPT-2's pre-tokenisation, all 256 bytes, and EOS as id 0."""

    def __init__(self, vocab_size: int, min_frequency: int, sample_bytes: int | None) -> None:
        self.vocab_size = vocab_size
        self.min_frequency = min_frequency
        self.sample_bytes = sample_bytes
        self.fingerprint = fingerprint("bpe", _RULE_VERSION, vocab_size, min_frequency, sample_bytes)

    def train(self, documents: Iterable[str], *, data_fingerprint: str, cache_dir: Path) -> Tokenizer:
        """The learned tokenizer. Small data may not yield all of `vocab_size`."""
        key = fingerprint("bpe tokenizer", self.fingerprint, data_fingerprint)

        def write(directory: Path) -> None:
            _log.info("learning a BPE of %d ids", self.vocab_size)
            self._learn(documents).save(str(directory / _FILE))

        directory = build_once(cache_dir, key, write, is_complete=lambda path: _load(path) is not None)
        backend = _load(directory)
        assert backend is not None
        return FastTokenizer(backend, name="bpe")

    def _learn(self, documents: Iterable[str]) -> FastBackend:
        backend = FastBackend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            min_frequency=self.min_frequency,
            special_tokens=[EOS_TOKEN],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        texts = documents if self.sample_bytes is None else sample(documents, self.sample_bytes)
        backend.train_from_iterator(texts, trainer)
        return backend


def _load(directory: Path) -> FastBackend | None:
    """The learned tokenizer, or None when it isn't there or damaged."""
    try:
        return FastBackend.from_str((directory / _FILE).read_text(encoding="utf-8"))
    # The library raises a bare Exception for text that isn't a tokenizer.
    except Exception:
        return None


def sample(documents: Iterable[str], max_bytes: int) -> list[str]:
    """About `max_bytes` of UTF-8 text: the documents with the smallest hashes, so an even sample in any order.

    Holds no more than that in memory. If even the first of them is longer, its beginning.
    """
    kept: list[tuple[int, str]] = []
    total = 0
    for text in documents:
        content = text.encode()
        heapq.heappush(kept, (-document_hash(content), text))
        total += len(content)
        while total > max_bytes and len(kept) > 1:
            total -= len(heapq.heappop(kept)[1].encode())
    texts = [text for _, text in sorted(kept, reverse=True)]
    if total > max_bytes:
        return [texts[0].encode()[:max_bytes].decode(errors="ignore")]
    return texts


def bpe(
    vocab_size: Annotated[int, Field(ge=_MIN_VOCAB_SIZE, description="Ids, the end token included.")] = 4096,
    min_frequency: Annotated[int, Field(ge=1, description="Times a pair must occur to become a token.")] = 2,
    sample_bytes: Annotated[
        Annotated[int, Field(ge=1)] | None, Field(description="Text to learn from; null is all of it.")
    ] = 20_000_000,
) -> TrainableTokenizer:
    """A byte-level BPE of `vocab_size` ids, learned from the training documents and cached by their content.

    `min_frequency` is how often a pair must occur to become a token. `sample_bytes` bounds the text it learns
    from (null: all of it).
    """
    if vocab_size < _MIN_VOCAB_SIZE:
        raise ArgumentError("vocab_size", f"{vocab_size} is below {_MIN_VOCAB_SIZE}, the 256 bytes and the end token")
    return ByteLevelBpe(vocab_size, min_frequency, sample_bytes)
