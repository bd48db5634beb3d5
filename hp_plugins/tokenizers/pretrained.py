"""A finished tokenizer, from a Hugging Face directory or the Hub."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field
from tokenizers import Tokenizer as FastBackend

from hp_core.data.chat.template import ChatTemplate, PlacedTokens
from hp_core.data.chat.tokens import as_placed
from hp_core.data.fingerprint import file_fingerprint, fingerprint
from hp_core.errors import ArgumentError


class PretrainedTokenizer:
    """A transformers tokenizer with an EOS. Its own rule for BOS is kept; an EOS it adds itself is taken off."""

    # What other processes make again for themselves.
    remade: ClassVar[tuple[str, ...]] = ("_placing",)

    def __init__(self, tokenizer: Any, *, name: str) -> None:
        self.name = name
        self.eos_id: int = tokenizer.eos_token_id
        self.vocab_size: int = max(tokenizer.get_vocab().values()) + 1
        self.fingerprint = _fingerprint(tokenizer)
        self._tokenizer = tokenizer
        self._adds_eos = tokenizer("a")["input_ids"][-1:] == [self.eos_id]

    @property
    def backend(self) -> Any:
        """The tokenizer of transformers."""
        return self._tokenizer

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

    def decode_all(self, ids: Sequence[int]) -> str:
        """The text with special tokens written out, exactly as spaced by the ids."""
        text: str = self._tokenizer.decode(list(map(int, ids)), clean_up_tokenization_spaces=False)
        return text

    def save(self, directory: Path) -> None:
        """Write all its files, chat template included."""
        self._tokenizer.save_pretrained(directory)

    @cached_property
    def stop_tokens(self) -> Mapping[str, int]:
        """The end token and the other special tokens, but for BOS, padding and the unknown token."""
        tokenizer = self._tokenizer
        others = {tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id} - {self.eos_id}
        special = {
            added.content: number
            for number, added in tokenizer.added_tokens_decoder.items()
            if added.special and number not in others
        }
        return {**special, str(tokenizer.eos_token): self.eos_id}

    def chat_template(
        self, template: str | None = None, *, arguments: Mapping[str, Any] | None = None, date: str | None = None
    ) -> ChatTemplate:
        """Its chat template, or the given text, or that of a `.jinja` file. Raises `ArgumentError`."""
        from hp_plugins.tokenizers.chat_template import TransformersTemplate

        tokenizer = self._tokenizer
        if not tokenizer.is_fast:
            raise ArgumentError(
                "tokenizer",
                f"the tokenizer {self.name!r} can't tell where its tokens stand in a text",
                "it has no tokenizer.json",
            )
        if template is not None:
            text = template_text(template)
            texts = (text, text)
        else:
            texts = self._own_templates()
        return TransformersTemplate(tokenizer, texts, arguments or {}, date)

    def _own_templates(self) -> tuple[str, str]:
        """The templates for conversations without tools and with."""
        try:
            return self._tokenizer.get_chat_template(), self._tokenizer.get_chat_template(tools=[])
        except ValueError as error:
            named = self._tokenizer.chat_template
            reason = (
                f"several chat templates, none of them 'default': {', '.join(named)}" if named else "no chat template"
            )
            raise ArgumentError(
                "chat_template", f"the tokenizer {self.name!r} has {reason}", "give one, as text or a .jinja file"
            ) from error

    def with_chat_template(self, template: str) -> PretrainedTokenizer:
        """The same tokenizer, which is saved with the given chat template (text or a `.jinja` file)."""
        tokenizer = copy.copy(self._tokenizer)
        tokenizer.chat_template = template_text(template)
        return PretrainedTokenizer(tokenizer, name=self.name)

    def place(self, texts: Sequence[str]) -> list[PlacedTokens]:
        """The tokens of each text; special tokens written in it count as such, and none is added."""
        encodings = self._placing.encode_batch(list(texts), add_special_tokens=False)
        return [as_placed(one.ids, one.offsets) for one in encodings]

    def spell(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        text: str = self._tokenizer.decode(
            list(map(int, ids)), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    @cached_property
    def _placing(self) -> FastBackend:
        backend = FastBackend.from_str(self._tokenizer.backend_tokenizer.to_str())
        # A post-processor adds special tokens, and takes the blanks at a token's edges off its place.
        backend.post_processor = None
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        return backend

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self.remade}


def pretrained(
    path: Annotated[str, Field(description="Hugging Face directory or hub id.")],
    revision: Annotated[str | None, Field(description="Branch, tag or commit of a hub id.")] = None,
    eos_token: Annotated[str | None, Field(description="The token that ends a document; null is its own.")] = None,
) -> PretrainedTokenizer:
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
        # Left to itself, transformers asks the terminal whether to run foreign code.
        tokenizer = AutoTokenizer.from_pretrained(
            str(local) if local.is_dir() else path, revision=revision or "main", trust_remote_code=False
        )
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


def template_text(template: str) -> str:
    """The text of a chat template, which is given as it is or as the path of a `.jinja` file."""
    if not template.endswith(".jinja") or "{" in template:
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ArgumentError("chat_template", f"{template!r} can't be read: {error}") from error


def _fingerprint(tokenizer: Any) -> str:
    """Of the files it saves: they hold everything that changes ids, whatever kind of tokenizer it is."""
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        files = sorted(path for path in Path(directory).rglob("*") if path.is_file())
        return fingerprint("pretrained", tokenizer.eos_token_id, *map(file_fingerprint, files))
