"""The first weights of adapters: those of `peft`, from the seed and the layer's name alone, on any number of ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from hp_core.config.peft import PeftConfig
from hp_core.model.adapters.inject import NAME, PARTS
from hp_core.model.adapters.layers import adapted_layers, saved_modules
from hp_core.model.initialize import stream
from hp_core.model.replacement.layout import keep_own_part, whole


@torch.no_grad()
def initialize_adapters(model: nn.Module, config: PeftConfig, seed: int, device: torch.device) -> None:
    """Materialise and fill the adapters of a model whose own weights are there, sharded or not. Every rank calls it.

    Matrices are drawn whole, as `peft` does (He et al. 2015 with a=sqrt(5), as of torch's linear layers, and zeros;
    normal ones for embeddings), and each rank keeps its part. DoRA's lengths are those of the weights that a layer
    begins with (Liu et al. 2024, equation 5); modules to be trained whole begin as they are. No rank holds more than
    one layer's whole weight.
    """
    for fqn, layer in adapted_layers(model).items():
        for part in PARTS:
            layer.get_submodule(part).to_empty(device=device)
        _fill(fqn, layer, config, seed)
        if config.use_dora:
            keep_own_part(layer.lora_magnitude_vector[NAME].weight, _lengths(layer))
    for wrapper in saved_modules(model).values():
        copy = wrapper.modules_to_save[NAME]
        copy.to_empty(device=device)
        kept = wrapper.original_module.state_dict(keep_vars=True)
        for name, tensor in copy.state_dict(keep_vars=True).items():
            keep_own_part(tensor, whole(kept[name]))


def matrices(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """The two matrices of a layer's adapter, (r, in) and (out, r); of an embedding, `in` are its rows."""
    if layer.lora_embedding_A:
        return layer.lora_embedding_A[NAME], layer.lora_embedding_B[NAME]
    return layer.lora_A[NAME].weight, layer.lora_B[NAME].weight


def _fill(fqn: str, layer: Any, config: PeftConfig, seed: int) -> None:
    down, up = matrices(layer)
    drawn = torch.Generator().manual_seed(stream(seed, f"{fqn}.lora"))
    first, second = (torch.zeros(one.shape, dtype=torch.float32) for one in (down, up))
    kind = config.init_lora_weights
    if layer.lora_embedding_A:
        # `peft` draws the second of an embedding, and leaves both as drawn where it is told not to initialise.
        if kind is False:
            nn.init.normal_(first, generator=drawn)
        nn.init.normal_(second, generator=drawn)
    elif kind == "gaussian":
        nn.init.normal_(first, std=1 / config.r, generator=drawn)
    else:
        nn.init.kaiming_uniform_(first, a=math.sqrt(5), generator=drawn)
        if kind is False:
            nn.init.kaiming_uniform_(second, a=math.sqrt(5), generator=drawn)
    keep_own_part(down, first.to(down.dtype))
    keep_own_part(up, second.to(up.dtype))


def _lengths(layer: Any) -> torch.Tensor:
    """The norms of the rows of the weight as (out, in), with what is added to it at first."""
    magnitude = layer.lora_magnitude_vector[NAME]
    weight = whole(layer.base_layer.weight).float()
    down, up = (whole(one).float() for one in matrices(layer))
    weight = (weight.T if magnitude.fan_in_fan_out else weight) + layer.scaling[NAME] * (up @ down)
    lengths: torch.Tensor = torch.linalg.norm(weight, dim=1)
    return lengths.to(magnitude.weight.dtype)
