"""Activation checkpointing: modules whose forward pass is run again in the backward pass instead of being kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hp_core.config.memory import ActivationCheckpointConfig
from hp_core.errors import InputError, Problem
from hp_core.model.patterns import chosen_modules


class Recomputed:
    """A module's forward that keeps its inputs alone, or products as well, and runs again for the backward pass.

    An object rather than a closure, so that a copy of the module runs its own forward.
    """

    def __init__(self, forward: Callable[..., Any], *, keeps_products: bool = False) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self.keeps_products = keeps_products

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What `forward` returns; random numbers are the same in both runs."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        # By place: torch looks for what it keeps, and for the device whose random numbers it keeps, there alone.
        values = (*args, *kwargs.values())
        if self.keeps_products:
            # By its name: torch.compile doesn't understand a function that an object has.
            return checkpoint(self._call, tuple(kwargs), *values, use_reentrant=False, context_fn=_keep_products)
        return checkpoint(self._call, tuple(kwargs), *values, use_reentrant=False)

    def _call(self, names: tuple[str, ...], *values: Any) -> Any:
        num_args = len(values) - len(names)
        return self.forward(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))


def checkpoint_activations(model: nn.Module, config: ActivationCheckpointConfig) -> list[str]:
    """Have modules of a model compute their activations again in the backward pass, in place; nothing is renamed.

    Hooks around a module, FSDP2's among them, run once: what is run again is its forward alone.

    Args:
        model: the whole model, before it is divided into pipeline stages.
        config: which modules, and what of them is kept.

    Returns:
        The FQNs of the modules.

    Raises:
        InputError: see `chosen_modules`; or `n` is more than there are modules.
    """
    if config.mode == "off":
        return []
    chosen = chosen_modules(model, config.modules, "activation_checkpoint.modules")
    if config.mode == "every_n":
        assert config.n is not None
        if config.n > len(chosen):
            message = f"of {len(chosen)} modules, none is every {config.n}th"
            raise InputError(Problem(message, path="activation_checkpoint.n", hint=f"use at most {len(chosen)}"))
        chosen = chosen[config.n - 1 :: config.n]
    for _, module in chosen:
        module.forward = Recomputed(module.forward, keeps_products=config.mode == "selective")
    return [name for name, _ in chosen]


def _keep_products() -> Any:
    return create_selective_checkpoint_contexts(_products())


@functools.cache
def _products() -> list[Any]:
    """The operators whose results cost more to compute than to keep: products, attention, exchanges between ranks."""
    aten, exchange = torch.ops.aten, torch.ops._c10d_functional
    return [
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten._grouped_mm.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        exchange.all_to_all_single.default,
        exchange.all_gather_into_tensor.default,
        exchange.reduce_scatter_tensor.default,
        exchange.all_reduce.default,
    ]
