"""Any model of images and text of transformers, from a directory, a hub id or a configuration."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from hp_core.model.build import build_transformers_model
from hp_core.model.kinds import IMAGE_TEXT
from hp_core.parallel.setup import DistributedSetup
from hp_plugins.models.arguments import (
    Attention,
    Config,
    Generation,
    MasterDtype,
    Pretrained,
    RemoteCode,
    Revision,
    check_revision,
)


def image_text(
    *,
    pretrained: Pretrained = None,
    revision: Revision = None,
    config: Config = None,
    dtype: MasterDtype = "float32",
    attn_implementation: Attention = "sdpa",
    generation_config: Generation = None,
    trust_remote_code: RemoteCode = False,
    distributed_setup: DistributedSetup,
    peft_config: Any = None,
    activation_checkpoint: Any = None,
    activation_swap: Any = None,
    compile_config: Any = None,
) -> PreTrainedModel:
    """Build a model of images and text: skeleton on meta, sharded, then loaded or initialised.

    Its vision tower lies whole on each tensor rank, and is sharded over the data ranks as the rest. An
    optimizer's group with `match: "model.visual.*"` and `frozen: true` trains the language model alone.

    Raises:
        ArgumentError: no model is named, a config key is unknown or wrong, or the weight files don't fit.
    """
    check_revision(pretrained, revision)
    return build_transformers_model(
        IMAGE_TEXT,
        setup=distributed_setup,
        pretrained=pretrained,
        revision=revision,
        config=config or {},
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        generation_config=generation_config,
        peft_config=peft_config,
        activation_checkpoint=activation_checkpoint,
        activation_swap=activation_swap,
        compile_config=compile_config,
    )
