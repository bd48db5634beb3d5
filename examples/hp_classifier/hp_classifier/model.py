"""Any sequence classifier of transformers."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from hp_core import ArgumentError, DistributedSetup, finish_model, model_config


def sequence_classifier(
    *,
    config: Annotated[dict[str, Any], Field(description="The configuration, with model_type, of initial weights.")],
    labels: Annotated[list[str], Field(min_length=2, description="Every label, in the order of the data set's.")],
    distributed_setup: DistributedSetup,
) -> PreTrainedModel:
    """Build a model that gives each text a logit for each label.

    Raises:
        ArgumentError: a key of the configuration is unknown or wrong, or no token is for padding.
    """
    settings = model_config(
        config, model_types=MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, kind="sequence classifier"
    )
    if settings.pad_token_id is None:
        # Models that read from left to right look for the last token before the padding.
        raise ArgumentError("config.pad_token_id", "is missing", "write the tokenizer's end-of-text id; 256 for bytes")
    settings.id2label = dict(enumerate(labels))
    settings.label2id = {label: number for number, label in enumerate(labels)}
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(settings, dtype=torch.float32)
    finish_model(model, distributed_setup)
    return model
