"""Gathering the parameters of the next blocks while one computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from torch import nn
from torch.distributed.fsdp import FSDPModule

from hp_core.config.models import FsdpConfig
from hp_core.errors import InputError, Problem


def prefetch_blocks(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], config: FsdpConfig) -> None:
    """Have each block of a sharded `model` start the gathering of those that follow it in either pass.

    Without it the CPU starts a block's gathering as it reaches the block, and FSDP2 that of one block ahead in the
    backward pass. Blocks of other lists (a vision tower) may not run at all, so none reaches beyond its own.

    Args:
        model: the root, sharded like each block.
        blocks: the model's blocks with their FQNs, in the order in which they run.
        config: `forward_prefetch` and `backward_prefetch`.

    Raises:
        InputError: there are fewer blocks than are to be gathered ahead.
    """
    lists = [[block for _, block in members] for _, members in groupby(blocks, lambda one: one[0].rpartition(".")[0])]
    require_depths(config, max(map(len, lists), default=0))
    for members in lists:
        # The root runs first in both passes.
        start = [model] if len(lists) == 1 else []
        _chain([*start, *members], config.forward_prefetch, forward=True)
        if config.backward_prefetch > 1:
            _chain([*start, *reversed(members)], config.backward_prefetch, forward=False)


def require_depths(config: FsdpConfig, num_layers: int, of: str = "the model") -> None:
    """Refuse to gather more layers ahead than there are.

    Raises:
        InputError: `forward_prefetch` or `backward_prefetch` is larger.
    """
    depths = {"forward_prefetch": config.forward_prefetch, "backward_prefetch": config.backward_prefetch}
    problems = [
        Problem(
            f"{depth} layers can't be gathered ahead of another: {of} has {num_layers}",
            path=f"fsdp_config.{key}",
            hint=f"use at most {num_layers}",
        )
        for key, depth in depths.items()
        if depth > max(1, num_layers)
    ]
    if problems:
        raise InputError(problems)


def _chain(order: Sequence[nn.Module], depth: int, *, forward: bool) -> None:
    for index, module in enumerate(order):
        ahead = _sharded_in(order[index + 1 : index + 1 + depth])
        if not ahead or not isinstance(module, FSDPModule):
            continue
        if forward:
            module.set_modules_to_forward_prefetch(ahead)
        else:
            module.set_modules_to_backward_prefetch(ahead)


def _sharded_in(blocks: Iterable[nn.Module]) -> list[FSDPModule]:
    """The blocks, each with the experts in it that are sharded apart."""
    return [module for block in blocks for module in block.modules() if isinstance(module, FSDPModule)]
