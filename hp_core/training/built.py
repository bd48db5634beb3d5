"""What a building hook or component may hand back, brought to one type or refused."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hp_core.errors import InputError, Problem
from hp_core.training.protocols import OffersLRScheduler, OffersOptimizer
from hp_core.training.schedule import scheduler_state


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


def require_each_once(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer that doesn't hold each trainable parameter of the model, and nothing else, once."""
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    held = set(listed)
    missing = [name for parameter, name in names.items() if parameter not in held]
    what = None
    if missing:
        what = f"does not hold {missing[0]!r}"
    elif len(listed) != len(held):
        what = "holds a parameter twice"
    elif held - set(model.parameters()):
        what = "holds a tensor that is no parameter of the model"
    if what is not None:
        raise InputError(Problem(f"{what}; each trainable parameter belongs to exactly one group", path="optimizer"))


def require_loss_call(loss_fn: nn.Module, columns: Sequence[str] = ()) -> None:
    """Refuse a loss whose `forward` can't be called with `model_output`, `labels` and its `columns`."""
    given = ("model_output", "labels", *columns)
    signature = inspect.signature(loss_fn.forward)
    try:
        signature.bind(**dict.fromkeys(given))
    except TypeError as error:
        message = f"{type(loss_fn).__name__}.forward can't be called with {', '.join(given[:-1])} and {given[-1]}"
        hint = f"write def forward(self, *, {', '.join(given)})"
        more = [name for name, one in signature.parameters.items() if _is_needed(one) and name not in given]
        if more and set(given) <= set(signature.parameters):
            hint = f"declare columns = {(*columns, *more)} to be given arrays of the rows"
        raise InputError(Problem(message, path="loss_fn", hint=hint)) from error


def _is_needed(parameter: inspect.Parameter) -> bool:
    by_name = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    return by_name and parameter.default is parameter.empty


def require_without_parameters(loss_fn: nn.Module) -> None:
    """Refuse a loss with trainable parameters: nothing would train, reduce or save them."""
    names = [name for name, parameter in loss_fn.named_parameters() if parameter.requires_grad]
    if names:
        message = f"{type(loss_fn).__name__} has the trainable parameter {names[0]!r}, which nothing would train"
        raise InputError(Problem(message, path="loss_fn", hint="make it part of the model, or freeze it"))


def require_savable(scheduler: LRScheduler) -> None:
    """Refuse a scheduler whose state no checkpoint could hold, before the first step rather than after the last."""
    try:
        json.dumps(scheduler_state(scheduler))
    except (TypeError, ValueError) as error:
        message = f"{type(scheduler).__name__}.state_dict() can't be saved as JSON: {error}"
        raise InputError(Problem(message, path="lr_scheduler")) from error


def _refused(built: Any, section: str, wanted: str) -> InputError:
    return InputError(Problem(f"built a {type(built).__name__}, expected {wanted}", path=section))
