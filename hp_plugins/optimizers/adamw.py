"""AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import nn
from torch.optim import Optimizer

from hp_plugins.optimizers.groups import Beta, ParameterGroup, freeze, parameter_groups

# The device types for which torch has a fused kernel.
FUSED_DEVICES = frozenset({"cpu", "cuda", "xpu", "mps"})


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), fused where the device has it."""

    def __init__(
        self,
        lr: Annotated[float, Field(gt=0, description="Peak learning rate.")],
        betas: Annotated[tuple[Beta, Beta], Field(description="Decay of the two moments.")] = (0.9, 0.95),
        eps: Annotated[float, Field(gt=0, description="Added to the root of the second moment.")] = 1e-8,
        weight_decay: Annotated[
            float, Field(ge=0, description="Decay of matrices; norms, biases and embeddings are left out.")
        ] = 0.1,
        groups: Annotated[Sequence[ParameterGroup], Field(description="Other settings by parameter name.")] = (),
        fused: Annotated[bool | None, Field(description="Default: where the device has a fused kernel.")] = None,
        *,
        model: nn.Module,
    ) -> None:
        freeze(model, groups)
        devices = {parameter.device.type for parameter in model.parameters()}
        self._optimizer = torch.optim.AdamW(
            parameter_groups(model, model.named_parameters(), lr=lr, weight_decay=weight_decay, groups=groups),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            fused=devices <= FUSED_DEVICES if fused is None else fused,
        )

    def get_optimizer(self) -> Optimizer:
        """The torch optimizer."""
        return self._optimizer
