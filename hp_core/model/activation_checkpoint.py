"""Activation checkpointing: modules whose forward pass is run again in the backward pass instead of being kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from hp_core.config.memory import ActivationCheckpointConfig
from hp_core.errors import InputError, Problem
from hp_core.model.replacement.claim import nearest_pattern
from hp_core.model.units import blocks

_PATH = "activation_checkpoint.modules"


class Recomputed:
    """A module's forward that keeps its inputs alone, or what `context_fn` says, and runs again for the backward pass.

    An object rather than a closure, so that a copy of the module runs its own forward.
    """

    def __init__(self, forward: Callable[..., Any], context_fn: Callable[[], Any]) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self.context_fn = context_fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What `forward` returns; random numbers are the same in both runs."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, context_fn=self.context_fn, **kwargs)


def checkpoint_activations(model: nn.Module, config: ActivationCheckpointConfig) -> list[str]:
    """Have modules of a model compute their activations again in the backward pass, in place; nothing is renamed.

    Hooks around a module, FSDP2's among them, run once: what is run again is its forward alone.

    Args:
        model: the whole model, before it is divided into pipeline stages.
        config: which modules, and what of them is kept.

    Returns:
        The FQNs of the modules.

    Raises:
        InputError: a pattern matches no module, or modules inside each other; there are no layers.
    """
    if config.mode == "off":
        return []
    chosen = _chosen(model, config)
    if config.mode == "every_n":
        assert config.n is not None
        if config.n > len(chosen):
            message = f"of {len(chosen)} modules, none is every {config.n}th"
            raise InputError(Problem(message, path="activation_checkpoint.n", hint=f"use at most {len(chosen)}"))
        chosen = chosen[config.n - 1 :: config.n]
    context_fn = _keep_products if config.mode == "selective" else noop_context_fn
    for _, module in chosen:
        module.forward = Recomputed(module.forward, context_fn)
    return [name for name, _ in chosen]


def _chosen(model: nn.Module, config: ActivationCheckpointConfig) -> list[tuple[str, nn.Module]]:
    if config.modules is None:
        layers = blocks(model)
        if not layers:
            raise InputError(Problem("the model has no list of layers", path=_PATH, hint="name modules by pattern"))
        return layers
    named = {name: module for name, module in model.named_modules() if name}
    problems: list[Problem] = []
    found: set[str] = set()
    for index, pattern in enumerate(config.modules):
        hits = {name for name in named if fnmatchcase(name, pattern)}
        lists = sorted(name for name in hits if isinstance(named[name], (nn.ModuleList, nn.ModuleDict)))
        path = f"{_PATH}[{index}]"
        if not hits:
            hint = nearest_pattern(pattern, named)
            problems.append(Problem(f"{pattern!r} matches no module of the model", path=path, hint=hint))
        elif lists:
            message = f"{pattern!r} matches {lists[0]!r}, a list, which has no forward pass"
            problems.append(Problem(message, path=path, hint="use a pattern of its members alone"))
        found |= hits
    problems += [] if problems else _inside_each_other(found)
    if problems:
        raise InputError(problems)
    return [(name, module) for name, module in named.items() if name in found]


def _inside_each_other(names: set[str]) -> list[Problem]:
    for name in sorted(names):
        parts = name.split(".")
        around = [parent for length in range(1, len(parts)) if (parent := ".".join(parts[:length])) in names]
        if around:
            message = f"{name!r} is inside {around[0]!r}, which computes it again anyway"
            return [Problem(message, path=_PATH, hint="use patterns that match one of the two")]
    return []


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
