"""Initial weights that depend on the seed and the parameter's name, and on nothing else.

Each block is initialised whole, on the host, from a random stream seeded by its FQN; every rank then keeps its own
part. So is every other module, together with the leaves below it, which some families (CLIP) fill from there. So one
process and a thousand start from the same weights, and no rank holds more than one whole block, or module and leaves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from hp_core.errors import InputError
from hp_core.model.replacement.layout import keep_own_part
from hp_core.model.units import blocks, modules_bottom_up


@torch.no_grad()
def initialize_weights(model: PreTrainedModel, seed: int) -> None:
    """Fill the parameters and buffers of a materialised `model` (sharded or not) by its own `_init_weights`.

    Raises:
        InputError: the model's initialisation leaves a parameter or buffer untouched; the message names it.
    """
    inside: set[nn.Module] = set()
    for fqn, block in blocks(model):
        members = list(modules_bottom_up(block, fqn))
        inside.update(module for _, module in members)
        _initialize_together(model, fqn, members, {members[0][0]: stream(seed, fqn)})
    for fqn, module in modules_bottom_up(model):
        if module in inside or (fqn and _is_leaf(module)):
            continue
        leaves = [
            (f"{fqn}.{name}" if fqn else name, one)
            for name, one in module.named_children()
            if _is_leaf(one) and one not in inside
        ]
        members = [*leaves, (fqn, module)]
        _initialize_together(model, fqn, members, {member: stream(seed, member) for member, _ in members})


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _initialize_together(
    model: PreTrainedModel, fqn: str, members: list[tuple[str, nn.Module]], streams: Mapping[str, int]
) -> None:
    """Initialise modules in their order; `streams` are the seeds of those from which on another stream is drawn."""
    originals = [
        (module, name, parameter)
        for _, module in members
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    buffers = [
        (f"{member}.{name}", buffer)
        for member, module in members
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_floating_point()
    ]
    for _, buffer in buffers:
        buffer.fill_(torch.nan)
    for module, name, parameter in originals:
        whole = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype, device="cpu")
        module._parameters[name] = nn.Parameter(whole, requires_grad=False)
    try:
        with torch.random.fork_rng(devices=[]), guard_torch_init_functions():
            for member, module in members:
                if member in streams:
                    torch.manual_seed(streams[member])
                _owner(model, member)._init_weights(module)
        wholes = [module.get_parameter(name).detach() for module, name, _ in originals]
    finally:
        for module, name, parameter in originals:
            module._parameters[name] = parameter
    for (_, name, parameter), whole in zip(originals, wholes, strict=True):
        if whole.isnan().any():
            raise InputError(_untouched(model, f"{fqn}: parameter {name}"))
        keep_own_part(parameter, whole)
    for name, buffer in buffers:
        if buffer.isnan().any():
            raise InputError(_untouched(model, f"buffer {name}"))


def reset_buffers(model: PreTrainedModel) -> None:
    """Recompute the buffers that no checkpoint holds (rotary frequencies), which materialising left as garbage."""
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    model.initialize_weights()


def _owner(model: PreTrainedModel, fqn: str) -> PreTrainedModel:
    """The innermost transformers model above a module: each family initialises its own part of a composite."""
    return [module for module in _path(model, fqn) if isinstance(module, PreTrainedModel)][-1]


def _path(model: nn.Module, fqn: str) -> Iterator[nn.Module]:
    yield model
    module = model
    for name in fqn.split(".") if fqn else ():
        module = module.get_submodule(name)
        yield module


def stream(seed: int, fqn: str) -> int:
    """The seed of the random stream of what has this name."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{fqn}".encode(), digest_size=8).digest(), "big") >> 1


def _untouched(model: PreTrainedModel, what: str) -> str:
    return f"{type(model).__name__}._init_weights leaves {what} without a value, so it can't be trained from a config"
