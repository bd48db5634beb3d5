"""One atomic build: skeleton on meta, sharding, materialising, weights. What it returns is final."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hp_core.model.config import model_config
from hp_core.model.initialize import initialize_weights
from hp_core.model.load import load_weights, weight_files
from hp_core.parallel.fsdp import DTYPES, shard_model
from hp_core.parallel.setup import DistributedSetup


def build_causal_lm(
    *,
    setup: DistributedSetup,
    pretrained: str | None,
    revision: str | None,
    config: Mapping[str, Any],
    dtype: str,
    attn_implementation: str,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """A causal language model of transformers, sharded and with its weights, in training mode.

    The order is fixed and nothing after it may re-shard or re-cast: skeleton on the meta device, sharding, then
    either the weights of `pretrained` (each rank reads its own part) or initial weights from `setup.seed` (the same
    for any number of ranks).

    Raises:
        ArgumentError: see `model_config` and `load_weights`.
    """
    settings = model_config(
        pretrained=pretrained, revision=revision, values=config, trust_remote_code=trust_remote_code
    )
    settings.use_cache = False
    files = weight_files(pretrained, revision) if pretrained is not None else []
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            settings,
            attn_implementation=attn_implementation,
            dtype=DTYPES[dtype],
            trust_remote_code=trust_remote_code,
        )
    shard_model(model, setup)
    if pretrained is not None:
        load_weights(model, files, dtype=DTYPES[dtype])
        model.to(setup.device)  # type: ignore[arg-type]
    else:
        model.to_empty(device=setup.device)
        model.tie_weights()
        initialize_weights(model, setup.seed)
    model.train()
    return model
