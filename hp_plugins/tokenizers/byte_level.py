"""The tokenizer that needs no vocabulary: one id for each of the 256 bytes, and one that ends a document."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from hp_core.data.fingerprint import fingerprint
from hp_core.data.protocols import Tokenizer

# What EOS is called where a tokenizer has words for its ids.
EOS_TOKEN = "<|endoftext|>"
_EOS_ID = 256


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of the text's UTF-8 form; 256 is EOS. There is no BOS."""

    name = "bytes"
    vocab_size = 257
    eos_id = _EOS_ID
    fingerprint = fingerprint("bytes", 1)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The UTF-8 bytes of each text."""
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text; bytes that aren't UTF-8 become U+FFFD, and EOS becomes nothing."""
        return bytes(value for value in ids if value < _EOS_ID).decode(errors="replace")

    def decode_all(self, ids: Sequence[int]) -> str:
        """The text with EOS written as `<|endoftext|>`."""
        runs = groupby(ids, key=lambda value: value == _EOS_ID)
        return "".join(EOS_TOKEN * len(list(run)) if is_end else self.decode(list(run)) for is_end, run in runs)

    def save(self, directory: Path) -> None:
        """Write the same mapping as a byte-level BPE without merges, which transformers can load."""
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as FastBackend

        from hp_plugins.tokenizers.fast import FastTokenizer

        backend = FastBackend(models.BPE(vocab=_byte_characters(), merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(EOS_TOKEN, special=True, normalized=False)])
        FastTokenizer(backend, name=self.name).save(directory)


def _byte_characters() -> dict[str, int]:
    """GPT-2's printable character for each byte: itself where it is printable, else one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


def byte_tokenizer() -> Tokenizer:
    """Build the byte tokenizer."""
    return ByteTokenizer()
