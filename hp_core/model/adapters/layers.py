"""The modules that `peft` has put around others, found without importing it where nobody has."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# What the names of all parameters of adapters have after that of their layer.
ADAPTER = ".lora_"


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers with LoRA in a model (of type `peft.tuners.lora.LoraLayer`), by FQN."""
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.lora import LoraLayer

    return {fqn: module for fqn, module in model.named_modules() if isinstance(module, LoraLayer)}


def saved_modules(model: nn.Module) -> dict[str, Any]:
    """The modules that are trained whole (of type `peft.utils.ModulesToSaveWrapper`), by FQN."""
    if "peft" not in sys.modules:
        return {}
    from peft.utils import ModulesToSaveWrapper

    return {fqn: module for fqn, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)}


def base_of(module: nn.Module) -> nn.Module:
    """The layer of the plain model that a layer with LoRA is around, or `module` itself."""
    if "peft" in sys.modules:
        from peft.tuners.lora import LoraLayer

        if isinstance(module, LoraLayer):
            base: nn.Module = module.base_layer
            return base
    return module


@contextmanager
def plain_modules(model: nn.Module, but: Collection[nn.Module | None] = ()) -> Iterator[None]:
    """Put the plain model's modules back in their places for the time of the `with` block.

    So names and types are those that the model's own code and files know. What `but` holds stays wrapped.
    """
    wrapped: dict[str, tuple[nn.Module, nn.Module]] = {
        **{fqn: (layer, layer.base_layer) for fqn, layer in adapted_layers(model).items()},
        **{fqn: (one, one.original_module) for fqn, one in saved_modules(model).items()},
    }
    changed = {fqn: pair for fqn, pair in wrapped.items() if not any(pair[0] is one for one in but)}
    for fqn, (_, inner) in changed.items():
        model.set_submodule(fqn, inner, strict=True)
    try:
        yield
    finally:
        for fqn, (outer, _) in changed.items():
            model.set_submodule(fqn, outer, strict=True)
