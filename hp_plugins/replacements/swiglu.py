"""Feed-forward of gate, up and down projections that keeps less for the backward pass."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn

from hp_core import ArgumentError, ReplacementContext, module_replacement
from hp_plugins.replacements.gated import is_silu
from hp_plugins.replacements.gated import swiglu as lean_swiglu
from hp_plugins.replacements.probe import Facts, differs, failure, on_cpu, random
from hp_plugins.replacements.takeover import Behaviour, arguments, take_over, the_only

_PROJECTIONS = frozenset({"gate_proj", "up_proj", "down_proj"})
_HINT = "narrow match, or write module_type, so that only feed-forwards with gate_proj, up_proj and down_proj are hit"


class LeanSwiGLU(Behaviour):
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020), over the last dimension; value and gradients bit for bit.

    Of the four tensors of intermediate size that the plain expression keeps for the backward pass (gate, silu(gate),
    up, their product) this keeps three; silu is computed again.
    """

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, *positional: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """(…, size) to (…, size). The projections are called as modules, so whatever wraps them still runs."""
        hidden_states: torch.Tensor = the_only(positional, named)
        activated = lean_swiglu(self.gate_proj(hidden_states), self.up_proj(hidden_states))
        return self.down_proj(activated)  # type: ignore[no-any-return]


@module_replacement
def swiglu(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    """Keep a quarter less of a SwiGLU feed-forward's intermediate activations.

    Raises:
        ArgumentError: the module is no feed-forward of that form (a mixture of experts, one fused projection), or its
            activation is not SiLU, or it has dropout.
    """
    del module_fqn, context
    name = type(module).__name__
    held = [name for name, child in module._modules.items() if child is not None]
    if {*held} - {"act_fn"} != _PROJECTIONS or module._parameters or module._buffers:
        inside = ", ".join([*held, *module._parameters, *module._buffers]) or "nothing"
        raise ArgumentError("", f"{name} is no SwiGLU feed-forward: it holds {inside}", _HINT)
    if len(taken := arguments(module)) != 1:
        raise ArgumentError("", f"{name} has another forward: ({', '.join(taken)})", _HINT)
    biases = tuple(vars(module.get_submodule(one))["_parameters"].get("bias") is not None for one in _ORDER)
    reason = _difference(Facts.of(module, without=_PROJECTIONS), biases)
    if reason is not None:
        raise ArgumentError("", f"{name} {reason}", _HINT)
    return take_over(module, LeanSwiGLU)


_ORDER = ("gate_proj", "up_proj", "down_proj")


@lru_cache(maxsize=256)
def _difference(facts: Facts, biases: tuple[bool, ...]) -> str | None:
    with on_cpu():
        original = facts.build()
        for name, bias, (wide, high) in zip(_ORDER, biases, ((8, 12), (8, 12), (12, 8)), strict=True):
            linear = nn.Linear(1, 1, bias=bias)
            linear.weight = nn.Parameter(random(high, wide, seed=len(name)), requires_grad=False)
            if bias:
                linear.bias = nn.Parameter(random(high, seed=high), requires_grad=False)
            original.add_module(name, linear)
        inputs = random(5, 8, seed=1)
        try:
            theirs = original(inputs)
            if "act_fn" in dict(facts.children) and not is_silu(original.act_fn):
                return f"activates by {type(original.act_fn).__name__}, not SiLU"
            if differs(take_over(original, LeanSwiGLU)(inputs), theirs):
                return "computes something else than down(silu(gate(x)) * up(x))"
            original.train()
            torch.default_generator.manual_seed(0)
            theirs = original(inputs)
            torch.default_generator.manual_seed(0)
            ours = take_over(original, LeanSwiGLU)(inputs)
        except Exception as error:
            return failure(error)
    return "adds something in training, such as dropout, that would be lost" if differs(ours, theirs) else None
