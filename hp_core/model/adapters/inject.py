"""Adapters into a model on the meta device, made by the library `peft`; everything else of the model is frozen."""

from __future__ import annotations

import dataclasses
import warnings

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hp_core.config.peft import PeftConfig, missing_library
from hp_core.errors import InputError, Problem
from hp_core.model.adapters.layers import adapted_layers
from hp_core.model.adapters.targets import Chosen, choose
from hp_core.parallel.setup import DistributedSetup

# What peft calls the one adapter that there is.
NAME = "default"
# The parts of a layer that peft trains.
PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


def inject_adapters(model: PreTrainedModel, config: PeftConfig, setup: DistributedSetup) -> None:
    """Put adapters around modules of a model, in place, and freeze all but them and the modules to be trained whole.

    Args:
        model: on meta, whole, with its modules replaced.
        config: which modules, and what adapters they get.
        setup: how many ranks share the model.

    Raises:
        InputError: `peft` isn't installed, patterns make no sense, or the ranks can't share what they choose.
    """
    problem = missing_library(config)
    if problem is not None:
        raise InputError(problem)
    from peft import LoraConfig, inject_adapter_in_model
    from peft.utils import ModulesToSaveWrapper

    chosen = choose(model, config)
    _refuse(model, config, setup, chosen)
    settings = LoraConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=list(chosen.targets),
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        init_lora_weights=config.init_lora_weights,
        fan_in_fan_out=any(isinstance(model.get_submodule(one), Conv1D) for one in chosen.targets),
        modules_to_save=list(chosen.saved) or None,
        task_type="CAUSAL_LM" if model.can_generate() else None,
    )
    # By the type of a model peft would take some linear layers for experts that transformers has fused since.
    around = nn.ModuleDict({"model": model})
    targets = [f"model.{one}" for one in chosen.targets]
    prefixed = dataclasses.replace(settings, target_modules=targets, modules_to_save=None)
    # It warns of ties and layouts of weights that are refused above, or set for each layer by itself.
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        inject_adapter_in_model(prefixed, around, NAME)
        for fqn in chosen.saved:
            wrapper = ModulesToSaveWrapper(model.get_submodule(fqn), NAME)
            wrapper.set_adapter(NAME)
            model.set_submodule(fqn, wrapper, strict=True)
    model.peft_config = {NAME: settings}
    dtype = torch.float32 if config.autocast_adapter_dtype else model.dtype
    for layer in adapted_layers(model).values():
        for part in PARTS:
            layer.get_submodule(part).to(dtype)


def _refuse(model: PreTrainedModel, config: PeftConfig, setup: DistributedSetup, chosen: Chosen) -> None:
    problems = []
    if chosen.saved and config.autocast_adapter_dtype and model.dtype != torch.float32:
        name = str(model.dtype).removeprefix("torch.")
        message = f"they would be trained in {name} beside adapters in float32"
        hint = "write model.dtype: float32 and mixed_precision.param_dtype, or peft.autocast_adapter_dtype: false"
        problems.append(Problem(message, path="peft.modules_to_save", hint=hint))
    ends = [one for one in (model.get_input_embeddings(), model.get_output_embeddings()) if one is not None]
    at_ends = [fqn for fqn in (*chosen.targets, *chosen.saved) if _holds(model.get_submodule(fqn), ends)]
    if at_ends and setup.sizes.pp > 1:
        message = f"stages know the embedding and the head as they are, and {at_ends[0]!r} is changed"
        problems.append(Problem(message, path="peft", hint="leave it out, or remove accelerator.pp_size"))
    if problems:
        raise InputError(problems)


def _holds(module: nn.Module, ends: list[nn.Module]) -> bool:
    return any(one is end for one in module.modules() for end in ends)
