"""Finished tokenizers of the two kinds in use: byte-level BPE, and BPE on blanks written as `▁` with byte fallback."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastBackend
from transformers import PreTrainedTokenizerFast

from hp_plugins.tokenizers.pretrained import PretrainedTokenizer

Kind = Literal["bytes", "bytes_nfc", "metaspace", "metaspace_never", "legacy"]

TEXTS = [
    "the cat sat on the mat, and what is it now? It is this. hello world\n\nuser\nassistant\nsystem\n",
    "naïve café 日本語 🙂 ok\n1. one\n2. two\n\n    indented  twice\nASSISTANT: yes USER: no [INST] [/INST] <<SYS>>",
] * 5


@cache
def learned(kind: Kind, special: tuple[str, ...], right_stripping: bool = False) -> FastBackend:
    is_bytes = kind.startswith("bytes")
    if is_bytes:
        backend = FastBackend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.normalizer = normalizers.NFC() if kind == "bytes_nfc" else None
        first, alphabet = [], sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        backend = FastBackend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        if kind == "legacy":
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            scheme = "first" if kind == "metaspace" else "never"
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        strip = [] if kind == "metaspace_never" else [decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        first, alphabet = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))], []
    trainer = trainers.BpeTrainer(
        vocab_size=len(first) + 500, special_tokens=first, initial_alphabet=alphabet, show_progress=False
    )
    # Single words, or what a Metaspace without splits would learn are whole sentences.
    words = TEXTS if is_bytes else [word for text in TEXTS for word in text.replace(" ", "\x00 ").split("\x00")]
    backend.train_from_iterator(words, trainer)
    backend.add_special_tokens(
        [AddedToken(one, special=True, normalized=False, rstrip=right_stripping) for one in special]
    )
    return backend


def finished(
    kind: Kind,
    special: Sequence[str],
    *,
    eos: str,
    bos: str | None = None,
    template: str | None = None,
    right_stripping: bool = False,
    name: str = "made",
) -> PretrainedTokenizer:
    """A tokenizer with these special tokens and this chat template."""
    backend = learned(kind, tuple(special), right_stripping)
    names = {"eos_token": eos, **({} if bos is None else {"bos_token": bos})}
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **names)
    fast.chat_template = template
    return PretrainedTokenizer(fast, name=name)
