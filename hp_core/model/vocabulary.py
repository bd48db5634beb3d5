"""How many tokens a model knows, compared with its tokenizer."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import nn
from transformers import PreTrainedModel

from hp_core.data.protocols import Tokenizer
from hp_core.errors import InputError, Problem


@runtime_checkable
class HasEmbeddings(Protocol):
    """A model of transformers, one around it, or another that tells as they do what its tokens become first."""

    def get_input_embeddings(self) -> Any:
        """The module of its input embeddings."""
        ...


def vocabulary_of(model: nn.Module) -> int | None:
    """How many tokens a model knows, whatever its configuration calls that; None where it can't be told."""
    embeddings = model.get_input_embeddings() if isinstance(model, HasEmbeddings) else None
    if isinstance(embeddings, nn.Embedding):
        return embeddings.num_embeddings
    if not isinstance(model, PreTrainedModel):
        return None
    # A stage of a pipeline may have none, and a replacement may be another kind of module.
    size = model.config.get_text_config().to_dict().get("vocab_size")
    return size if isinstance(size, int) else None


def check_vocabulary(model: nn.Module, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer of more tokens than the model knows.

    Raises:
        InputError: it has more.
    """
    size = vocabulary_of(model)
    if size is not None and tokenizer.vocab_size > size:
        raise InputError(
            Problem(
                f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, the model's vocabulary only {size}",
                path="model",
                hint=f"set model.config.vocab_size to {tokenizer.vocab_size} or more",
            )
        )
