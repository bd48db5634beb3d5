"""A byte-level tokenizer of the `tokenizers` library, and the files transformers loads it from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastBackend

from hp_core.data.fingerprint import fingerprint
from hp_plugins.tokenizers.byte_level import EOS_TOKEN


class FastTokenizer:
    """Wraps a byte-level `tokenizers.Tokenizer` whose vocabulary holds `EOS_TOKEN`.

    A document that spells out the end token doesn't produce it: its characters are encoded as any text.
    """

    def __init__(self, backend: FastBackend, *, name: str) -> None:
        self.name = name
        self.vocab_size = backend.get_vocab_size()
        eos_id = backend.token_to_id(EOS_TOKEN)
        if eos_id is None:
            raise ValueError(f"the vocabulary lacks {EOS_TOKEN!r}")
        self.eos_id = eos_id
        self.fingerprint = fingerprint("fast tokenizer", backend.to_str())
        self._backend = backend
        backend.encode_special_tokens = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # The library forgets it when it is pickled.
        self._backend.encode_special_tokens = True

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, encoded on all cores; there is no BOS."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text; bytes that aren't UTF-8 become U+FFFD."""
        return self._backend.decode(list(map(int, ids)), skip_special_tokens=True)

    def decode_all(self, ids: Sequence[int]) -> str:
        """The text with special tokens written out."""
        return self._backend.decode(list(map(int, ids)), skip_special_tokens=False)

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`."""
        from transformers import PreTrainedTokenizerFast

        exported = PreTrainedTokenizerFast(
            tokenizer_object=self._backend, eos_token=EOS_TOKEN, clean_up_tokenization_spaces=False
        )
        exported.save_pretrained(directory)
