from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import AutoConfig

from hp_core.errors import InputError
from hp_core.model.vocabulary import check_vocabulary, vocabulary_of
from hp_core.testing import tiny_model
from hp_plugins.tokenizers.byte_level import ByteTokenizer
from tests.pictures import model_config


class Other(nn.Module):
    """Embeddings of no library."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def test_the_size_of_a_vocabulary_whatever_the_model() -> None:
    assert vocabulary_of(tiny_model("llama", vocab_size=257)) == 257
    assert vocabulary_of(nn.Linear(2, 2)) is None
    config = model_config()
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(
            AutoConfig.for_model(config.pop("model_type"), **config),
        )
    assert vocabulary_of(model) == 320
    model.set_input_embeddings(Other(model.get_input_embeddings().weight))
    assert vocabulary_of(model) == 320


def test_a_tokenizer_of_more_tokens_is_refused() -> None:
    check_vocabulary(tiny_model("llama", vocab_size=257), ByteTokenizer())
    check_vocabulary(nn.Linear(2, 2), ByteTokenizer())  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"model: the tokenizer bytes has 257 tokens, the model's vocabulary only 200"):
        check_vocabulary(tiny_model("llama", vocab_size=200), ByteTokenizer())
