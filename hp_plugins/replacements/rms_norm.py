"""RMSNorm by `torch.nn.functional.rms_norm`, for every norm of that formula in transformers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hp_core import ArgumentError, ReplacementContext, module_replacement
from hp_plugins.replacements.probe import Facts, failure, on_cpu, random
from hp_plugins.replacements.takeover import Behaviour, arguments, take_over, the_only

# Two ways of rounding to bfloat16 (8 bits) may end one step apart, and never more: see FusedRMSNorm.
_ONE_STEP_OF_BF16 = 2.0**-7


@dataclass(frozen=True)
class Formula:
    """What a norm computes beyond its weight: `eps`, and whether a wider weight leaves the input's dtype as it is."""

    eps: float
    keeps_dtype: bool


class FusedRMSNorm(Behaviour):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang and Sennrich 2019), shape kept.

    In fp32 the result is the original's (the same bits on CPU). In bf16 the originals round twice, before and after
    the product with the weight, and `F.rms_norm` once: of 2M results about a quarter differ, each by one bf16 step,
    and the largest error against exact arithmetic is half of the original's (0.4 % instead of 0.8 %).
    """

    weight: nn.Parameter
    formula: Formula

    def forward(self, *positional: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """Normalise one tensor, of shape (…, size)."""
        hidden_states: torch.Tensor = the_only(positional, named)
        weight, eps = self.weight, self.formula.eps
        if hidden_states.dtype == weight.dtype:
            return F.rms_norm(hidden_states, weight.shape, weight, eps)
        if self.formula.keeps_dtype:
            return F.rms_norm(hidden_states.float(), weight.shape, weight.float(), eps).to(hidden_states.dtype)
        return weight * F.rms_norm(hidden_states, weight.shape, None, eps)


@module_replacement
def rms_norm(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    """Compute a norm by `F.rms_norm`: on CUDA one kernel forward and one backward that keep the input alone.

    The original class's forward is tried on a small input, so any class with this formula is taken, whatever its
    name, and its eps is the one that reproduces its numbers. On CPU nothing is gained.

    Raises:
        ArgumentError: the module computes something else: `(1 + weight)`, a gate, a bias, no weight.
    """
    del module_fqn, context
    formula = _reason_or_formula(module)
    if isinstance(formula, str):
        hint = "narrow match to the norms that are x / sqrt(mean(x^2) + eps) * weight"
        raise ArgumentError("", f"{type(module).__name__} {formula}", hint)
    norm = take_over(module, FusedRMSNorm)
    norm.formula = formula
    return norm


def _reason_or_formula(module: nn.Module) -> Formula | str:
    held = [*dict(module.named_parameters(recurse=False)), *module._buffers, *module._modules]
    if held != ["weight"]:
        return f"is no RMSNorm with a weight alone: it holds {', '.join(held) or 'nothing'}"
    if len(taken := arguments(module)) != 1:
        return f"is no plain RMSNorm: its forward takes ({', '.join(taken)})"
    return _formula(Facts.of(module))


@lru_cache(maxsize=256)
def _formula(facts: Facts) -> Formula | str:
    with on_cpu():
        norm = facts.build()
        shape = facts.shape("weight")
        # Where the input is small, eps decides the result.
        inputs = random(3, 4, *shape, seed=0) * torch.tensor([1.0, 1e-3, 1e-6]).view(3, *[1] * (len(shape) + 1))
        try:
            theirs = norm(inputs)
            epsilons = [value for _, kind, value in facts.attributes if kind is float]
            eps = next((one for one in epsilons if _close(F.rms_norm(inputs, shape, norm.weight, one), theirs)), None)
            if eps is None:
                return _other_formula(inputs, norm.weight, epsilons, theirs)
            widened, low = norm(inputs.bfloat16()), _in_bf16(norm, inputs)
        except Exception as error:
            return failure(error)
        if not _close(F.rms_norm(inputs.bfloat16(), shape, norm.weight.bfloat16(), eps), low, _ONE_STEP_OF_BF16):
            return "does not normalise bfloat16 in fp32"
        return Formula(eps, keeps_dtype=widened.dtype == torch.bfloat16)


def _in_bf16(norm: Any, inputs: torch.Tensor) -> torch.Tensor:
    weight = norm.weight
    norm.weight = nn.Parameter(weight.bfloat16(), requires_grad=False)
    try:
        result: torch.Tensor = norm(inputs.bfloat16())
    finally:
        norm.weight = weight
    return result


def _other_formula(inputs: torch.Tensor, weight: torch.Tensor, epsilons: list[float], theirs: torch.Tensor) -> str:
    if any(_close(F.rms_norm(inputs, weight.shape, 1 + weight, eps), theirs) for eps in epsilons):
        return "multiplies by (1 + weight)"
    return "computes something else than x / sqrt(mean(x^2) + eps) * weight"


def _close(ours: torch.Tensor, theirs: torch.Tensor, relative: float = 1e-6) -> bool:
    return ours.dtype == theirs.dtype and torch.allclose(ours, theirs, rtol=relative, atol=0.0)
