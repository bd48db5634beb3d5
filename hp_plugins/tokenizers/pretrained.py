"""A finished tokenizer, from a Hugging Face directory or the Hub."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from hp_core.data.fingerprint import file_fingerprint, fingerprint
from hp_core.data.protocols import Tokenizer
from hp_core.errors import ArgumentError


class PretrainedTokenizer:
    """A transformers tokenizer with an EOS. Its own rule for BOS is kept; an EOS it adds itself is taken off."""

    def __init__(self, tokenizer: Any, *, name: str) -> None:
        self.name = name
        self.eos_id: int = tokenizer.eos_token_id
        self.vocab_size: int = max(tokenizer.get_vocab().values()) + 1
        self.fingerprint = _fingerprint(tokenizer)
        self._tokenizer = tokenizer
        self._adds_eos = tokenizer("a")["input_ids"][-1:] == [self.eos_id]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, however long; special tokens written in the text count as such."""
        if not texts:
            return []
        # verbose=False: packing cuts documents itself, so a document beyond model_max_length is nothing to warn of.
        encoded: list[list[int]] = self._tokenizer(
            list(texts), return_attention_mask=False, return_token_type_ids=False, verbose=False
        )["input_ids"]
        return [ids[:-1] for ids in encoded] if self._adds_eos else encoded

    def decode(self, ids: Sequence[int]) -> str:
        """The text, exactly as spaced by the ids."""
        text: str = self._tokenizer.decode(
            list(map(int, ids)), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def save(self, directory: Path) -> None:
        """Write all its files, chat template included."""
        self._tokenizer.save_pretrained(directory)


def pretrained(
    path: Annotated[str, Field(description="Hugging Face directory or hub id.")],
    revision: Annotated[str | None, Field(description="Branch, tag or commit of a hub id.")] = None,
    eos_token: Annotated[str | None, Field(description="The token that ends a document; null is its own.")] = None,
) -> Tokenizer:
    """The tokenizer of a Hugging Face directory or Hub repository, as `AutoTokenizer` loads it.

    `eos_token` names the token of the vocabulary that ends a document, for tokenizers that declare none or whose
    end-of-turn token is meant.
    """
    from transformers import AutoTokenizer

    local = Path(path).expanduser()
    if not local.is_dir() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise ArgumentError("path", f"there is no directory {path!r}")
    if local.is_dir() and revision is not None:
        raise ArgumentError("revision", "a directory has no revisions", "leave revision out")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(local) if local.is_dir() else path, revision=revision or "main")
    # Hub, parsing and conversion errors of several libraries come out of here; the user needs the first line.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ArgumentError(
            "path",
            f"no tokenizer can be loaded from {path!r}: {type(error).__name__}: {reason}",
            "give a directory with tokenizer files, or a Hub name and a network",
        ) from error
    if eos_token is not None:
        if eos_token not in tokenizer.get_vocab():
            raise ArgumentError("eos_token", f"{eos_token!r} is not in the vocabulary of {path!r}")
        tokenizer.eos_token = eos_token
    if tokenizer.eos_token_id is None:
        raise ArgumentError("path", f"the tokenizer {path!r} has no end token", "name one with eos_token")
    return PretrainedTokenizer(tokenizer, name=path)


def _fingerprint(tokenizer: Any) -> str:
    """Of the files it saves: they hold everything that changes ids, whatever kind of tokenizer it is."""
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        files = sorted(path for path in Path(directory).rglob("*") if path.is_file())
        return fingerprint("pretrained", tokenizer.eos_token_id, *map(file_fingerprint, files))
