"""Optimizers that each break one promise, and some that keep them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Momentum(Optimizer):
    """Keeps every promise: sign of a momentum, with decoupled decay of matrices."""

    def __init__(self, lr: float = 1e-2, weight_decay: float = 0.1, *, model: nn.Module) -> None:
        super().__init__(self.groups(model, weight_decay), {"lr": lr, "weight_decay": weight_decay})

    def groups(self, model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return [
            {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": weight_decay},
            {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
        ]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, group)

    def update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        if parameter.grad is None:
            return
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(self.direction(parameter, group), alpha=-group["lr"])

    def direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        return state["momentum"].mul_(0.9).add_(parameter.grad)


class Holder:
    """Keeps every promise: offers a torch optimizer by `get_optimizer`, and takes no weight decay."""

    def __init__(self, lr: float, *, model: nn.Module) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(parameters, lr=lr)

    def get_optimizer(self) -> Optimizer:
        return self.optimizer


# contract


def no_optimizer(model: nn.Module) -> Any:
    return {"params": list(model.parameters())}


def without_model(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


class Explodes(Momentum):
    def direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        return super().direction(parameter, group) / 0.0


# each_parameter_once


def takes_frozen(*, model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def tied_twice(*, model: nn.Module) -> Optimizer:
    parameters = [one for module in model.modules() for one in module.parameters(recurse=False) if one.requires_grad]
    return torch.optim.Adam(parameters, lr=1e-3)


def tied_in_two_groups(*, model: nn.Module) -> Optimizer:
    ends = {"model.embed_tokens", "lm_head"}
    groups = [
        {"params": [one for one in module.parameters(recurse=False) if one.requires_grad]}
        for name, module in model.named_modules()
        if name in ends
    ]
    held = {id(one) for group in groups for one in group["params"]}
    rest = [one for one in model.parameters() if one.requires_grad and id(one) not in held]
    return torch.optim.Adam([group for group in [*groups, {"params": rest}] if group["params"]], lr=1e-3)


def thaws(*, model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.requires_grad_(True).parameters(), lr=1e-3)


def misses_vectors(*, model: nn.Module) -> Optimizer:
    return torch.optim.Adam([one for one in model.parameters() if one.requires_grad and one.ndim > 1], lr=1e-3)


# each_parameter_moves


class ForgetsVectors(Momentum):
    def update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        if parameter.ndim > 1:
            super().update(parameter, group)


# missing_gradients


class DecaysWithoutGradient(Momentum):
    def update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        super().update(parameter, group)
        if parameter.grad is None:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])


class CoastsWithoutGradient(Momentum):
    def update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        super().update(parameter, group)
        if parameter.grad is None and "momentum" in self.state[parameter]:
            parameter.add_(self.state[parameter]["momentum"], alpha=-group["lr"])


# zero_gradients


class DividesByZero(Momentum):
    def direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        gradient = super().direction(parameter, group)
        return gradient / gradient.abs().mean()


class DecaysUndeclared(Momentum):
    def update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        super().update(parameter, group)
        if parameter.grad is not None and parameter.ndim > 1:
            parameter.mul_(1 - group["lr"] * 0.1)

    def groups(self, model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        return super().groups(model, 0.0)


class DecaysTwice(Momentum):
    def update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        super().update(parameter, group)
        if parameter.grad is not None:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])


class IgnoresDecay(Momentum):
    def update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        super().update(parameter, {**group, "weight_decay": 0.0})


class NoisyStep(Momentum):
    def direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        return super().direction(parameter, group) + 1e-3 * torch.ones_like(parameter) * (parameter.ndim > 1)


# decay_exclusions


class DecaysEverything(Momentum):
    def groups(self, model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        return [{"params": [one for one in model.parameters() if one.requires_grad]}]


class DecaysBiases(Momentum):
    """Knows norms by their name, as only one family has it."""

    def groups(self, model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        return [
            {"params": [one for name, one in named if "norm" not in name], "weight_decay": weight_decay},
            {"params": [one for name, one in named if "norm" in name], "weight_decay": 0.0},
        ]


# learning_rate


class KeepsItsRate(Momentum):
    def __init__(self, lr: float = 1e-2, *, model: nn.Module) -> None:
        self.rate = lr
        super().__init__(lr=lr, weight_decay=0.0, model=model)

    def update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        super().update(parameter, {**group, "lr": self.rate})


class TakesTheFirstRate(Momentum):
    def update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        super().update(parameter, {**group, "lr": self.param_groups[0]["lr"]})


class DecaysWithoutRate(Momentum):
    """The decay of a step doesn't follow the schedule."""

    def update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        super().update(parameter, {**group, "weight_decay": 0.0})
        if parameter.grad is not None:
            parameter.mul_(1 - 1e-2 * group["weight_decay"])


# no_hidden_step


class StepsWhenBuilt(Momentum):
    def __init__(self, *, model: nn.Module) -> None:
        super().__init__(weight_decay=0.0, model=model)
        self.step()


class StepsWhenAsked(Momentum):
    def state_dict(self) -> dict[str, Any]:
        if not self.state:
            self.step()
        return super().state_dict()


class FillsItsState(Momentum):
    """Takes a step with a rate of zero to have a state to show, as torch's own helper for checkpoints does."""

    def state_dict(self) -> dict[str, Any]:
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = 0.0
        self.step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        return super().state_dict()


# state_round_trip


class CountsInAttribute(Momentum):
    def __init__(self, *, model: nn.Module) -> None:
        super().__init__(model=model)
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.count += 1
        super().step()

    def direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        return super().direction(parameter, group) / (1 - 0.9**self.count)


class RemembersTheStart(Momentum):
    def __init__(self, *, model: nn.Module) -> None:
        super().__init__(model=model)
        self.start = {one: one.detach().clone() for one in model.parameters()}

    def direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        return super().direction(parameter, group) + parameter - self.start[parameter]


class KeepsAList(Momentum):
    def direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        self.state[parameter].setdefault("history", []).append(1)
        return super().direction(parameter, group)


# sharded_update, state_on_shards


class NormOfItsShard(Momentum):
    def direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        gradient = super().direction(parameter, group)
        return gradient / (local(gradient).norm() + 1e-6)


class PlainState(Momentum):
    """Remembers a tensor that nobody knows to be a part of a larger one."""

    def direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(local(parameter))
        state["momentum"].mul_(0.9).add_(local(parameter.grad))
        local(parameter).sub_(group["lr"] * state["momentum"])
        return torch.zeros_like(parameter)
