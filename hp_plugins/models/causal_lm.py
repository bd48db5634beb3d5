"""Any causal language model of transformers, from a directory, a hub id or a configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from transformers import PreTrainedModel

from hp_core.errors import ArgumentError
from hp_core.model.build import build_causal_lm
from hp_core.parallel.setup import DistributedSetup


def causal_lm(
    *,
    pretrained: Annotated[
        str | None, Field(description="Hugging Face directory or hub id; its weights are loaded.")
    ] = None,
    revision: Annotated[str | None, Field(description="Branch, tag or commit of a hub id.")] = None,
    config: Annotated[
        dict[str, Any] | None,
        Field(
            description="Configuration values: on top of the pretrained ones, or, with model_type, the whole "
            "configuration of a model with initial weights. A key the family does not have is an error."
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Field(description="Dtype of the master weights. bfloat16 is pure bf16: small updates vanish."),
    ] = "float32",
    attn_implementation: Annotated[
        Literal["sdpa", "eager"],
        Field(description="Attention code. Others are refused: they would let packed documents see each other."),
    ] = "sdpa",
    generation_config: Annotated[
        dict[str, Any] | None,
        Field(description="Settings on top of the pretrained generation_config.json, which exports of the model hold."),
    ] = None,
    trust_remote_code: Annotated[bool, Field(description="Run the model code a hub id or directory brings.")] = False,
    distributed_setup: DistributedSetup,
) -> PreTrainedModel:
    """Build a causal language model: skeleton on meta, sharded, then loaded or initialised.

    Raises:
        ArgumentError: no model is named, a config key is unknown or wrong, or the weight files don't fit.
    """
    if revision is not None and pretrained is None:
        raise ArgumentError("revision", "has no effect without pretrained", "leave revision out")
    return build_causal_lm(
        setup=distributed_setup,
        pretrained=pretrained,
        revision=revision,
        config=config or {},
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        generation_config=generation_config,
    )
