"""The update rule, and the component that a recipe names under `optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn
from torch.optim import Optimizer

Beta = Annotated[float, Field(ge=0, lt=1)]


class LionOptimizer(Optimizer):
    """Lion (Chen et al. 2023, algorithm 2): every weight moves by the learning rate, only the sign is learnt.

    All of it is element by element, so a shard of a parameter moves exactly as that part of the whole one does.
    """

    def __init__(
        self, parameters: Iterable[Any], lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient, and return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, (beta_1, beta_2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"]
                direction = (momentum * beta_1 + parameter.grad * (1 - beta_1)).sign()
                # Decoupled: the decay doesn't pass through the momentum and its sign.
                parameter.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
                momentum.mul_(beta_2).add_(parameter.grad, alpha=1 - beta_2)
        return loss


class Lion:
    """Lion with weight decay on matrices alone; norms, biases and whatever else is a vector are left out.

    The authors advise a third to a tenth of AdamW's learning rate, and three to ten times its weight decay.
    """

    def __init__(
        self,
        lr: Annotated[float, Field(gt=0, description="Peak learning rate: how far each weight moves in a step.")],
        betas: Annotated[
            tuple[Beta, Beta], Field(description="Weight of the momentum in the direction, and its decay.")
        ] = (0.9, 0.99),
        weight_decay: Annotated[float, Field(ge=0, description="Decay of matrices.")] = 0.1,
        *,
        model: nn.Module,
    ) -> None:
        decayed, others = [], []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                # The biases of a mixture's experts are stacked to matrices, so the name counts as well.
                (others if parameter.ndim < 2 or name.endswith("bias") else decayed).append(parameter)
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = LionOptimizer([group for group in groups if group["params"]], lr, betas)

    def get_optimizer(self) -> LionOptimizer:
        """Return the optimizer that the trainer steps."""
        return self._optimizer
