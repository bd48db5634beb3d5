"""The kinds of transformers models that are built here: what each is called, its class, and its families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)


@dataclass(frozen=True)
class ModelKind:
    """What messages call it, the class of transformers that builds it, and that class's families by `model_type`."""

    title: str
    auto_class: Any
    families: Mapping[str, Any] = field(repr=False)


CAUSAL_LM = ModelKind("causal language model", AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
IMAGE_TEXT = ModelKind(
    "model of images and text", AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
)
