"""The shapes that components built by name may have."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch.optim import Optimizer


@runtime_checkable
class OffersOptimizer(Protocol):
    """An optimizer component: builds its optimizer from `model` and hands it out."""

    def get_optimizer(self) -> Optimizer:
        """The optimizer the training loop steps."""
        ...


@runtime_checkable
class OffersLRScheduler(Protocol):
    """A learning-rate component: builds its scheduler from `optimizer` and `train_iters` and hands it out."""

    def get_lr_scheduler(self) -> Any:
        """The scheduler the training loop advances once for each optimizer step."""
        ...


@runtime_checkable
class ChainsOptimizers(Protocol):
    """An optimizer made of several, each with parameters of its own."""

    optimizers: list[Optimizer]


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that hold state: the parts of a chained one, or the one itself."""
    return list(optimizer.optimizers) if isinstance(optimizer, ChainsOptimizers) else [optimizer]
