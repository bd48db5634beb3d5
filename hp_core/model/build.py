"""One atomic build: skeleton on meta, sharding, materialising, weights. What it returns is final."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hp_core.errors import ArgumentError
from hp_core.model.activation_checkpoint import checkpoint_activations
from hp_core.model.activation_swap import swap_activations
from hp_core.model.adapters.initialize import initialize_adapters
from hp_core.model.adapters.inject import inject_adapters
from hp_core.model.adapters.layers import plain_modules
from hp_core.model.compile import Compilation
from hp_core.model.config import model_config
from hp_core.model.generation import generation_config as generation_config_of
from hp_core.model.initialize import initialize_weights
from hp_core.model.kinds import IMAGE_TEXT, ModelKind
from hp_core.model.load import load_weights, weight_files
from hp_core.model.replacement.layout import original_layout
from hp_core.model.replacement.replacer import Replaced, replace_modules
from hp_core.parallel.context.attention import use_context_attention
from hp_core.parallel.context.trial import require_same_when_cut
from hp_core.parallel.dtypes import DTYPES
from hp_core.parallel.expert.experts import spread_experts
from hp_core.parallel.fsdp import shard_model
from hp_core.parallel.images import join_images, sees_images
from hp_core.parallel.pipeline.runner import Pipeline, members_of
from hp_core.parallel.plan.activations import Activations
from hp_core.parallel.plan.planner import Planner
from hp_core.parallel.setup import DistributedSetup
from hp_core.parallel.tensor.apply import apply_plan


def build_transformers_model(
    kind: ModelKind,
    *,
    setup: DistributedSetup,
    pretrained: str | None,
    revision: str | None,
    config: Mapping[str, Any],
    dtype: str,
    attn_implementation: str,
    trust_remote_code: bool,
    generation_config: Mapping[str, Any] | None = None,
    **features: Any,
) -> PreTrainedModel:
    """A model of transformers, sharded and with its weights, in training mode.

    The order is fixed and nothing after it may re-shard or re-cast: skeleton on the meta device, replacements,
    adapters, sharding, then either the weights of `pretrained` (each rank reads its own part) or initial weights from
    `setup.seed` (the same for any number of ranks, and whatever modules are replaced). `features` are those of
    `finish_model`.

    Raises:
        ArgumentError: see `model_config` and `load_weights`.
        InputError: see `hp_core.model.replacement.replacer.ModuleReplacer.apply`.
    """
    settings = model_config(
        config,
        pretrained=pretrained,
        revision=revision,
        trust_remote_code=trust_remote_code,
        # Of a pretrained one, the class that is built from it knows more.
        model_types=kind.families if pretrained is None else None,
        kind=kind.title,
    )
    generation = generation_config_of(pretrained, revision, generation_config or {}, settings)
    files = weight_files(pretrained, revision) if pretrained is not None else []
    model = _skeleton(kind, settings, attn_implementation, DTYPES[dtype], trust_remote_code)
    if generation is not None:
        model.generation_config = generation
    finish_model(model, setup, files if pretrained is not None else None, **features)
    return model


def finish_model(
    model: PreTrainedModel,
    distributed_setup: DistributedSetup,
    files: Sequence[str] | None = None,
    *,
    peft_config: Any = None,
    activation_checkpoint: Any = None,
    activation_swap: Any = None,
    compile_config: Any = None,
) -> None:
    """Replace, shard, materialise and fill the skeleton of a transformers model, in place; for model builders.

    Args:
        model: the skeleton, on the meta device, in the dtype of the master weights.
        distributed_setup: the run's devices, meshes, seed and replacements.
        files: the safetensors files with its weights; None draws initial weights from the seed.
        peft_config: what the recipe's `peft` asks for, as a model builder is given it; this and the following.
        activation_checkpoint: the same of `activation_checkpoint`.
        activation_swap: the same of `activation_swap`.
        compile_config: the same of `compile`.

    Raises:
        ArgumentError: see `load_weights`.
        InputError: see `hp_core.model.replacement.replacer.ModuleReplacer.apply`, `inject_adapters`,
            `checkpoint_activations`, `swap_activations`, `Compilation`, and
            `hp_core.parallel.context.trial.require_same_when_cut`.
    """
    setup = distributed_setup
    replaced = replace_modules(model, setup)
    if peft_config is not None:
        inject_adapters(model, peft_config, setup)
    activations = _spare(model, setup, activation_checkpoint, activation_swap)
    compilation = None if compile_config is None else Compilation.of(model, compile_config, setup)
    if sees_images(model):
        join_images(model, setup)
    plan = (setup.planner or Planner()).prepare(model, setup, activations)
    if setup.sizes.cp > 1:
        use_context_attention(model, setup)
    if plan.tensors is not None:
        apply_plan(model, plan.tensors, setup.mesh["tp"])
    if setup.expert_mesh is not None:
        spread_experts(model, setup, plan.experts)
    pipeline = Pipeline(model, setup, [one.layers for one in plan.stages]) if plan.stages else None
    shard_model(model, setup)
    with plain_modules(model):
        _make_weights(model, replaced, setup, files)
    if peft_config is not None:
        initialize_adapters(model, peft_config, setup.seed, setup.device)
    for module in members_of(model):
        module.training = True
    if pipeline is not None:
        pipeline.share_tied()
        pipeline.require_passing()
    if setup.sizes.cp > 1:
        require_same_when_cut(model, setup)
    if compilation is not None:
        compilation.install(model)


def _spare(model: PreTrainedModel, setup: DistributedSetup, checkpointing: Any, swapping: Any) -> Activations:
    recomputed = [] if checkpointing is None else checkpoint_activations(model, checkpointing)
    swapped = [] if swapping is None else swap_activations(model, swapping, setup.device, recomputed)
    return Activations("off" if checkpointing is None else checkpointing.mode, tuple(recomputed), tuple(swapped))


def _make_weights(
    model: PreTrainedModel, replaced: Sequence[Replaced], setup: DistributedSetup, files: Sequence[str] | None
) -> None:
    if files is None:
        model.to_empty(device=setup.device)
        model.tie_weights()
    with original_layout(model, replaced, setup):
        if files is None:
            initialize_weights(model, setup.seed)
        else:
            load_weights(model, list(files), dtype=model.dtype)
    model.to(setup.device)  # type: ignore[arg-type]


def _skeleton(
    kind: ModelKind, settings: PreTrainedConfig, attn_implementation: str, dtype: torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            model: PreTrainedModel = kind.auto_class.from_config(
                settings, attn_implementation=attn_implementation, dtype=dtype, trust_remote_code=trust_remote_code
            )
    except ValueError as error:
        if "Unrecognized configuration class" in str(error):
            message = f"holds a {settings.model_type!r}, which is no {kind.title}"
            hint = (
                "use model.name: image_text" if settings.model_type in IMAGE_TEXT.families else "use another component"
            )
            raise ArgumentError("pretrained", message, hint) from error
        if "attention" not in str(error):
            raise
        message = f"this family of models does not support {attn_implementation!r}"
        raise ArgumentError("attn_implementation", message, "write attn_implementation: eager") from error
    return model
