"""Several optimizers stepped as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


class ChainedOptimizer(Optimizer):
    """Steps `optimizers` in order; their parameter groups are its own, so a schedule reaches all of them."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step each optimizer once."""
        if closure is not None:
            raise ValueError("a chained optimizer takes no closure")
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """The parts' states, in order."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        # Loading gives each part new groups; a schedule must reach those, through the same list as before.
        self.param_groups[:] = [group for optimizer in self.optimizers for group in optimizer.param_groups]
