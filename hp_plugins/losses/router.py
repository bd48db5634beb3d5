"""The losses of a mixture's routers over all real tokens of a step: the balance of the load, and the z-loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn
from transformers import PreTrainedModel

from hp_core.errors import InputError, Problem
from hp_core.parallel.agreement import gathered
from hp_core.parallel.pipeline.runner import pipeline_of
from hp_core.parallel.setup import DistributedSetup
from hp_plugins.losses.objective import at_least_fp32
from hp_plugins.losses.router_probe import HINT, Routing, Scores, find_routers, score_function
from hp_plugins.losses.router_recording import RouterRecording

RouterBalance = Annotated[
    Annotated[float, Field(ge=0)] | None,
    Field(description="Weight of the routers' load-balancing loss; left out: what the model's config says."),
]
RouterZLoss = Annotated[float, Field(ge=0, description="Weight of the squared log-normaliser of the routers' logits.")]

BALANCE, Z_LOSS = "router_balance_loss", "router_z_loss"
_LOAD = "router_load"


@runtime_checkable
class ConfiguresRouterLoss(Protocol):
    """A model's configuration that says how much the load-balancing loss counts, and whether it does."""

    output_router_logits: bool
    router_aux_loss_coef: float


class RouterLosses:
    """Router losses for a loss that holds this object and hands its step terms on.

    With L routers (layers) of E experts and T real tokens in the step, over all its micro-batches and ranks:

    - balance: `balance * E * sum_e f_e * P_e`, where `f_e = (1/LT) * number of (token, layer, slot) sent to e` and
      `P_e = (1/LT) * sum over tokens and layers of p_e` (Switch Transformer, Fedus et al. 2021, eq. 4-6; all layers
      pooled as in transformers' `load_balancing_loss_func`). `f` has no gradient, so it is the step's statistic.
    - z: `z * mean over real tokens and layers of logsumexp(logits)^2` (ST-MoE, Zoph et al. 2022, eq. 5).

    `p` are the router's probabilities: the softmax of its logits, or where it scores experts by sigmoids these over
    their sum (DeepSeek-V3 report, eq. 17-20, whose `f` is divided by the experts per token as well and taken for each
    sequence and layer). The experts are those the router chose, with whatever bias or groups it has. Padding counts
    nowhere. Computed in fp32, or in float64 for logits of float64.
    """

    def __init__(self, balance: float | None = None, z: float = 0.0) -> None:
        self._balance = balance
        self._z = z
        self._bound: _Bound | None = None

    def bind(self, model: nn.Module, setup: DistributedSetup | None = None) -> None:
        """Find the routers of the finished model and how they score; nothing at all where both weights are 0.

        Every rank calls it: it runs a short forward pass. A pipeline rank has the routers of its own layers.

        Raises:
            InputError: the model has no routers, or one whose losses can't be computed exactly.
        """
        if self._bound is not None:
            self._bound.recording.remove()
            self._bound = None
        balance = configured_balance(model) if self._balance is None else self._balance
        if balance == 0 and self._z == 0:
            return
        routers = find_routers(model)
        if not any(_everywhere(len(routers), setup)):
            message = f"{type(model).__name__} has no routers that transformers knows of, so they have no losses"
            raise InputError(Problem(message, path="loss_fn", hint=HINT))
        found = score_function(model, routers)
        everywhere = _everywhere((len(routers), found), setup)
        known = next(one for _, one in everywhere if one is not None)
        if any(one not in (None, known) for _, one in everywhere):
            message = "routers in other layers have other experts, or score them otherwise"
            raise InputError(Problem(message, path="loss_fn", hint=HINT))
        # All ranks but those of a pipeline have the same routers.
        pp_size = 1 if setup is None else setup.sizes.pp
        num_routers = sum(number for number, _ in everywhere) * pp_size // len(everywhere)
        self._bound = _Bound(RouterRecording(routers, pipeline_of(model)), *known, num_routers, balance, self._z)

    def arm(self) -> None:
        """Record the model's next call, of which the terms are to be taken."""
        if self._bound is not None:
            self._bound.recording.arm()

    @property
    def needs_statistics(self) -> bool:
        """Whether the terms depend on where all tokens of the step are sent, as the balance does."""
        return self._bound is not None and self._bound.balance != 0

    def statistics(self, real_tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """How often the real tokens of the recorded call were sent to each expert, by all routers: (E,), float64.

        Args:
            real_tokens: bool, (rows, tokens); False on padding.

        Raises:
            RunError: a router did not see the tokens exactly once.
        """
        if self._bound is None or not self.needs_statistics:
            return {}
        real = real_tokens.flatten()
        nothing = torch.zeros(self._bound.num_experts, dtype=torch.float64, device=real.device)
        return {_LOAD: sum((load(one, real) for one in self._bound.recording.peek(len(real))), nothing)}

    def terms(
        self, real_tokens: torch.Tensor, num_real_tokens: int, statistics: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The recorded call's share of each loss that has a weight, with its gradient; ends the recording.

        Args:
            real_tokens: bool, (rows, tokens); False on padding.
            num_real_tokens: those of the whole step.
            statistics: the step's sums of what `statistics` gave.

        Raises:
            RunError: a router did not see the tokens exactly once, or was called without gradients.
        """
        if self._bound is None:
            return {}
        bound, real = self._bound, real_tokens.flatten()
        found: dict[str, torch.Tensor] = {}
        routings = bound.recording.take(len(real))
        if not routings:
            return {}
        # A step without a real token has nothing to divide, and all sums are zero.
        per_routing = 1 / (bound.num_routers * num_real_tokens) if num_real_tokens else 0.0
        masked = [masked_logits(one, real) for one in routings]
        if bound.balance:
            sums = torch.stack([(probabilities(one, bound.scores) * real[:, None]).sum(0) for one in masked]).sum(0)
            fractions = (statistics[_LOAD] * per_routing).to(sums)
            found[BALANCE] = bound.balance * len(sums) * per_routing * (fractions * sums).sum()
        if bound.z:
            squares = torch.stack([(one.logsumexp(-1).square() * real).sum() for one in masked])
            found[Z_LOSS] = bound.z * per_routing * squares.sum()
        return found


@dataclass(frozen=True)
class _Bound:
    """What the routers of a model gave, and what is computed of it."""

    recording: RouterRecording
    scores: Scores
    num_experts: int
    num_routers: int
    balance: float
    z: float


def _everywhere(value: Any, setup: DistributedSetup | None) -> list[Any]:
    return [value] if setup is None else gathered(value, setup)


def configured_balance(model: nn.Module) -> float:
    """The weight with which transformers would train the model on its load-balancing loss; 0 if it would not."""
    outermost = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    config: object = None if outermost is None else outermost.config.get_text_config()
    if isinstance(config, ConfiguresRouterLoss) and config.output_router_logits:
        return float(config.router_aux_loss_coef)
    return 0.0


def load(routing: Routing, real: torch.Tensor) -> torch.Tensor:
    """How often the tokens that are `real`, (tokens,), were sent to each expert: (experts,), float64."""
    counts = torch.zeros(routing.logits.shape[-1], dtype=torch.float64, device=real.device)
    slots = real.double()[:, None].expand(routing.experts.shape)
    return counts.scatter_add_(0, routing.experts.flatten(), slots.flatten())


def masked_logits(routing: Routing, real: torch.Tensor) -> torch.Tensor:
    """The logits, zero on padding, where they may be anything, and so may their gradient."""
    return at_least_fp32(routing.logits).where(real[:, None], 0.0)


def probabilities(logits: torch.Tensor, scores: Scores) -> torch.Tensor:
    """What a router makes of its logits (tokens, experts), normalised over the experts."""
    if scores == "softmax":
        return logits.softmax(-1)
    # Sigmoids over their sum, without the quotient of two numbers that may both be zero.
    return F.logsigmoid(logits).softmax(-1)
