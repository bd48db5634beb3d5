"""What a building hook or component may hand back, brought to one type or refused."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hp_core.errors import InputError, Problem
from hp_core.training.protocols import OffersLRScheduler, OffersOptimizer


def as_module(built: Any, section: str) -> nn.Module:
    """A model or a loss: an `nn.Module`."""
    if isinstance(built, nn.Module):
        return built
    raise _refused(built, section, "torch.nn.Module")


def as_optimizer(built: Any) -> Optimizer:
    """A torch optimizer, or what `get_optimizer()` of the component gives."""
    if not isinstance(built, Optimizer) and isinstance(built, OffersOptimizer):
        built = built.get_optimizer()
    if isinstance(built, Optimizer):
        return built
    raise _refused(built, "optimizer", "torch.optim.Optimizer, or an object with get_optimizer() that gives one")


def as_lr_scheduler(built: Any) -> LRScheduler:
    """A torch scheduler, or what `get_lr_scheduler()` of the component gives."""
    if not isinstance(built, LRScheduler) and isinstance(built, OffersLRScheduler):
        built = built.get_lr_scheduler()
    if isinstance(built, LRScheduler):
        return built
    wanted = "torch.optim.lr_scheduler.LRScheduler, or an object with get_lr_scheduler() that gives one"
    raise _refused(built, "lr_scheduler", wanted)


def _refused(built: Any, section: str, wanted: str) -> InputError:
    return InputError(Problem(f"built a {type(built).__name__}, expected {wanted}", path=section))
