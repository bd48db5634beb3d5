"""Where a model's routers are, and by which function of its logits each of them scores the experts."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from hp_core.errors import InputError, Problem
from hp_core.training.evaluation import evaluating

Scores = Literal["softmax", "sigmoid"]

HINT = "set loss_fn.router_balance=0 and leave router_z_loss out"

_LENGTH = 8
# How far the probe spreads a router's logits: far enough to tell its functions apart in half precision.
_SPREAD = 4.0
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Router:
    """A module that chooses experts; `index` says which part of its output are the logits."""

    fqn: str
    module: nn.Module
    index: int


@dataclass(frozen=True)
class Routing:
    """What a router gave: `logits` (tokens, experts), and of each chosen expert the score and number, (tokens, k)."""

    logits: torch.Tensor
    scores: torch.Tensor
    experts: torch.Tensor

    @classmethod
    def of(cls, output: Any, index: int) -> Routing | None:
        """Read a router's output; None if it is not clear what its parts are."""
        if not isinstance(output, tuple) or not all(isinstance(part, torch.Tensor) for part in output):
            return None
        others = [part for position, part in enumerate(output) if position != index]
        chosen = [part for part in others if not part.is_floating_point() and part.dtype != torch.bool]
        scores = (
            [part for part in others if part.is_floating_point() and part.shape == chosen[0].shape] if chosen else []
        )
        logits = output[index]
        if len(chosen) != 1 or len(scores) != 1 or logits.shape[:-1] != chosen[0].shape[:-1]:
            return None
        return cls(logits.flatten(0, -2), scores[0].flatten(0, -2), chosen[0].flatten(0, -2))


def find_routers(model: nn.Module) -> list[Router]:
    """The routers of a model of transformers, which names their classes for collecting `router_logits`."""
    recorders = [one for part in model.modules() if isinstance(part, PreTrainedModel) for one in _recorders(part)]
    found = []
    for fqn, module in model.named_modules():
        index = next((one.index for one in recorders if _names(one, fqn, module)), None)
        if index is not None:
            found.append(Router(fqn, module, index))
    return found


def _recorders(model: PreTrainedModel) -> Iterator[OutputRecorder]:
    named = model.can_record_outputs.get("router_logits", [])
    for one in named if isinstance(named, list) else [named]:
        if isinstance(one, OutputRecorder) and isinstance(one.target_class, type):
            yield one


def _names(recorder: OutputRecorder, fqn: str, module: nn.Module) -> bool:
    # FSDP2 gives a module a subclass of its own class.
    return isinstance(module, recorder.target_class) and (
        recorder.layer_name is None or f".{recorder.layer_name.strip('.')}." in f".{fqn}."
    )


def score_function(model: nn.Module, routers: list[Router]) -> tuple[Scores, int] | None:
    """How the routers turn logits into scores, and of how many experts; None if there are no routers.

    It is found out in a short forward pass. Every rank calls it: with sharded weights that is a collective.

    Raises:
        InputError: a router does not tell which experts it chose, scores them by neither function, or not by the
            same one, or for another number of experts, as the others.
    """
    probe = _Probe()
    handles = [one.module.register_forward_hook(probe.hook(one)) for one in routers]
    device = next(model.parameters()).device
    try:
        with evaluating(model):
            model(input_ids=torch.arange(_LENGTH, device=device)[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    for one in routers:
        if one.fqn not in probe.seen:
            raise _refused(one, "is not called for text alone")
    found = [_judged(one, probe.seen[one.fqn]) for one in routers]
    for one, scores in zip(routers, found, strict=True):
        if scores != found[0] or probe.experts(one) != probe.experts(routers[0]):
            raise _refused(one, f"has other experts, or scores them otherwise, than {routers[0].fqn}")
    return (found[0], probe.experts(routers[0])) if routers else None


class _Probe:
    """What the routers give for inputs that spread their logits."""

    def __init__(self) -> None:
        self.seen: dict[str, Routing | None] = {}

    def hook(self, router: Router) -> Any:
        def ask_again(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            # The weights are gathered here and now, whoever holds them between forward passes.
            spread = _spread(output, router.index)
            if spread == 0:
                # Some families start with routers of zeros, which tell nothing.
                module = _with_random_weights(module)
                spread = _spread(module.forward(*args), router.index)
            if spread:
                output = module.forward(args[0] * (_SPREAD / spread), *args[1:])
            self.seen[router.fqn] = Routing.of(output, router.index)

        return ask_again

    def experts(self, router: Router) -> int:
        routing = self.seen[router.fqn]
        return 0 if routing is None else routing.logits.shape[-1]


def _spread(output: Any, index: int) -> float | None:
    """How far logits are from their mean over the experts; None where an output holds none."""
    routing = Routing.of(output, index)
    if routing is None:
        return None
    logits = routing.logits.double()
    return float((logits - logits.mean(-1, keepdim=True)).abs().max())


def _with_random_weights(module: nn.Module) -> nn.Module:
    module = copy.deepcopy(module)
    for parameter in module.parameters():
        generator = torch.Generator(parameter.device).manual_seed(0)
        parameter.normal_(generator=generator)
    return module


def _judged(router: Router, routing: Routing | None) -> Scores:
    if routing is None:
        raise _refused(router, "does not give logits, the chosen experts and their scores")
    logits, scores, experts = routing.logits.double(), routing.scores.double(), routing.experts
    if experts.min() < 0 or experts.max() >= logits.shape[-1]:
        raise _refused(router, f"numbers its experts otherwise than 0 to {logits.shape[-1] - 1}")
    tolerance = 4 * torch.finfo(routing.scores.dtype).eps + _TOLERANCE
    candidates: dict[Scores, torch.Tensor] = {"softmax": F.log_softmax(logits, -1), "sigmoid": F.logsigmoid(logits)}
    errors = {name: _error(scores.log() - values.gather(1, experts)) for name, values in candidates.items()}
    fitting = [name for name, error in errors.items() if error <= tolerance]
    if not fitting:
        raise _refused(router, "scores the experts neither by a softmax nor by a sigmoid of its logits")
    if len(fitting) > 1 or max(errors.values()) <= 4 * tolerance:
        raise _refused(router, "gives scores that do not tell a softmax from a sigmoid of its logits")
    return fitting[0]


def _error(differences: torch.Tensor) -> float:
    """How far logarithms are from differing by a constant: for each token, or for all where one expert is chosen."""
    dim = 1 if differences.shape[1] > 1 else 0
    error = float((differences - differences.mean(dim, keepdim=True)).abs().max())
    return math.inf if math.isnan(error) else error


def _refused(router: Router, why: str) -> InputError:
    message = f"the router {router.fqn} ({type(router.module).__name__}) {why}, so its losses can't be computed"
    return InputError(Problem(message, path="loss_fn", hint=HINT))
