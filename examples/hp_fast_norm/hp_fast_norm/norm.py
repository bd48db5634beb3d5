"""The norm, and the factory that a recipe names under `plan_overrides`."""

from __future__ import annotations

import copy
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from hp_core import ArgumentError, ReplacementContext, module_replacement

# What the names of an RMSNorm's epsilon are in transformers.
EPSILONS = ("variance_epsilon", "eps")


class FastRMSNorm(nn.Module):
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis, in one call of torch instead of six.

    In fp32 it differs from the plain formula by rounding alone. In bf16 it multiplies by the weight before it rounds,
    where transformers rounds first, so it is the more exact of the two.
    """

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the normalised states, of the same shape and dtype as `hidden_states`."""
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)


@module_replacement
def fast_norm(
    module: nn.Module,
    module_fqn: str,
    context: ReplacementContext,
    *,
    eps: Annotated[float | None, Field(gt=0, description="Another epsilon; null keeps the module's.")] = None,
) -> nn.Module:
    """Replace an RMSNorm by one fused call; it keeps the weight, and with it the layout of every checkpoint."""
    del module_fqn, context
    own = next((vars(module)[name] for name in EPSILONS if name in vars(module)), None)
    if set(dict(module.named_parameters())) != {"weight"} or own is None:
        raise ArgumentError("", f"{type(module).__name__} is no RMSNorm: it needs a weight and an epsilon, no more")
    if not _is_plain(module, own):
        hint = "match only norms that multiply by their weight as it is"
        raise ArgumentError("", f"{type(module).__name__} computes something else than RMSNorm", hint)
    return FastRMSNorm(module.weight, own if eps is None else eps)


def _is_plain(module: nn.Module, eps: float) -> bool:
    """Try a copy on the CPU: `module` itself has no values yet. Some families multiply by `1 + weight`."""
    generator = torch.Generator().manual_seed(0)
    # A model is built with the meta device as the default, where nothing has a value.
    with torch.device("cpu"), torch.no_grad():
        tried = copy.deepcopy(module).to_empty(device="cpu").float()
        tried.weight.copy_(torch.rand(tried.weight.shape, generator=generator, dtype=torch.float32) + 0.5)
        states = torch.randn(3, *tried.weight.shape, generator=generator, dtype=torch.float32)
        return torch.allclose(tried(states), FastRMSNorm(tried.weight, eps)(states), rtol=1e-5, atol=1e-6)
