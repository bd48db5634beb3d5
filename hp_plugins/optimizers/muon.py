"""Muon for the matrices, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import nn
from torch.optim import Optimizer

from hp_core.errors import ArgumentError
from hp_core.parallel.expert.dispatch import num_experts_of
from hp_plugins.optimizers.adamw import FUSED_DEVICES
from hp_plugins.optimizers.chained import ChainedOptimizer
from hp_plugins.optimizers.groups import (
    Beta,
    ParameterGroup,
    anywhere,
    embeddings_and_head,
    freeze,
    not_decayed,
    parameter_groups,
)
from hp_plugins.optimizers.whole_matrix import RateRule, WholeMatrixMuon


def stacks_of_matrices(model: nn.Module) -> set[nn.Parameter]:
    """The fused parameters of a mixture's experts, (experts, rows, columns): a matrix for each expert."""
    return {
        parameter
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if parameter.ndim == 3 and len(parameter) == num_experts_of(module)
    }


class Muon:
    """Muon (Jordan et al. 2024): momentum made orthogonal by a Newton-Schulz iteration, for matrices.

    A mixture's fused experts are stacks of matrices, and each is made orthogonal by itself. Embeddings, the head,
    norms, biases and parameters of any other rank are trained by AdamW.
    """

    def __init__(
        self,
        lr: Annotated[float, Field(gt=0, description="Peak learning rate of the matrices.")],
        adamw_lr: Annotated[float, Field(gt=0, description="Peak learning rate of everything else.")],
        momentum: Annotated[float, Field(ge=0, lt=1, description="Decay of the momentum.")] = 0.95,
        nesterov: Annotated[bool, Field(description="Look ahead along the momentum.")] = True,
        ns_steps: Annotated[int, Field(ge=1, lt=100, description="Newton-Schulz iterations.")] = 5,
        adjust_lr_fn: Annotated[
            RateRule,
            Field(description="How the rate depends on a matrix's shape; match_rms_adamw suits rates tuned for AdamW."),
        ] = "original",
        weight_decay: Annotated[
            float, Field(ge=0, description="Decay of matrices; norms, biases and embeddings are left out.")
        ] = 0.1,
        adamw_betas: Annotated[tuple[Beta, Beta], Field(description="Decay of AdamW's moments.")] = (0.9, 0.95),
        adamw_eps: Annotated[float, Field(gt=0, description="AdamW's epsilon.")] = 1e-8,
        groups: Annotated[Sequence[ParameterGroup], Field(description="Other settings by parameter name.")] = (),
        *,
        model: nn.Module,
    ) -> None:
        freeze(model, groups)
        vectors = embeddings_and_head(model) | not_decayed(model)
        named = list(model.named_parameters())
        candidates = stacks_of_matrices(model) | {parameter for _, parameter in named if parameter.ndim == 2}
        candidates -= vectors
        matrices = [(name, p) for name, p in named if p.requires_grad and p in candidates]
        if not anywhere(model, bool(matrices)):
            raise ArgumentError("name", "the model has no trainable matrix for Muon", "write name: adamw")
        chosen = {parameter for _, parameter in matrices}
        others = [(name, parameter) for name, parameter in named if parameter not in chosen]
        optimizers: list[Optimizer] = [
            WholeMatrixMuon(
                parameter_groups(model, matrices, lr=lr, weight_decay=weight_decay, groups=groups),
                lr=lr,
                momentum=momentum,
                nesterov=nesterov,
                ns_steps=ns_steps,
                adjust_lr_fn=adjust_lr_fn,
                weight_decay=weight_decay,
            )
        ]
        rest = parameter_groups(model, others, lr=adamw_lr, weight_decay=weight_decay, groups=groups)
        if rest:
            fused = {parameter.device.type for _, parameter in others} <= FUSED_DEVICES
            optimizers.append(torch.optim.AdamW(rest, betas=adamw_betas, eps=adamw_eps, fused=fused))
        self._optimizer = ChainedOptimizer(optimizers)

    def get_optimizer(self) -> Optimizer:
        """The chained optimizer."""
        return self._optimizer
