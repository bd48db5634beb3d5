"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import nn
from torch.optim import Optimizer

from hp_core.errors import ArgumentError
from hp_plugins.optimizers.groups import ParameterGroup, freeze, parameter_groups


class SGD:
    """Gradient descent with momentum."""

    def __init__(
        self,
        lr: Annotated[float, Field(gt=0, description="Peak learning rate.")],
        momentum: Annotated[float, Field(ge=0, lt=1, description="Share of the last update that is kept.")] = 0.0,
        nesterov: Annotated[bool, Field(description="Look ahead along the momentum.")] = False,
        weight_decay: Annotated[
            float, Field(ge=0, description="L2 penalty on matrices; norms, biases and embeddings are left out.")
        ] = 0.0,
        groups: Annotated[Sequence[ParameterGroup], Field(description="Other settings by parameter name.")] = (),
        *,
        model: nn.Module,
    ) -> None:
        if nesterov and momentum == 0:
            raise ArgumentError("nesterov", "there is no momentum to look ahead along", "set momentum: 0.9")
        freeze(model, groups)
        self._optimizer = torch.optim.SGD(
            parameter_groups(model, model.named_parameters(), lr=lr, weight_decay=weight_decay, groups=groups),
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
        )

    def get_optimizer(self) -> Optimizer:
        """The torch optimizer."""
        return self._optimizer
