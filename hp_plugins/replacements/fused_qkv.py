"""Attention whose query, key and value projections are one linear layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hp_core import ArgumentError, Convert, ReplacementContext, module_replacement
from hp_plugins.replacements.attention import PROJECTIONS, StandardAttention, standard_attention
from hp_plugins.replacements.takeover import copied

_FUSED = PROJECTIONS[:3]

Tensor = torch.Tensor


class FusedQKVAttention(StandardAttention):
    """One `qkv_proj` whose output is q, k and v side by side; the rest is the model's attn_implementation.

    Its weight is the rows of `q_proj`, then those of `k_proj` and `v_proj`: ((heads + 2 key heads) * D, size).
    """

    sizes: tuple[int, ...]
    qkv_proj: nn.Linear

    def project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Project (batch, S, size) to q, k and v, each (batch, S, heads * D), in one product."""
        return self.qkv_proj(hidden_states).split(self.sizes, dim=-1)  # type: ignore[no-any-return]

    def weight_transforms(self) -> Sequence[Convert]:
        """Rows one under another, and cut apart again; the same for the biases."""
        tensors = ("weight", "bias") if self.qkv_proj.bias is not None else ("weight",)
        return [_transform(name, self.sizes) for name in tensors]


@module_replacement
def fused_qkv(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    """Project queries, keys and values in one product instead of three.

    Weights and biases are read from checkpoints with separate projections and exported to them again, bit for bit.
    Takes what `sdpa_attention` takes, with any attn_implementation.

    Raises:
        ArgumentError: the module is another kind of attention, or its projections can't be one: only some have a
            bias, or only some are trained, their dtypes differ, or one has hooks that would be lost.
    """
    del module_fqn, context
    attention = standard_attention(module, FusedQKVAttention)
    projections: list[Any] = [module._modules[name] for name in _FUSED]
    _refuse_different(projections)
    attention.sizes = tuple(one.weight.shape[0] for one in projections)
    for name in _FUSED:
        del attention._modules[name]
    attention.add_module("qkv_proj", _joined(projections))
    return attention


def _joined(projections: Sequence[nn.Linear]) -> nn.Linear:
    linear = copied(projections[0])
    for name, parameter in projections[0].named_parameters():
        whole = torch.cat([one.get_parameter(name).detach() for one in projections])
        linear.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    linear.out_features = linear.weight.shape[0]
    return linear


def _refuse_different(projections: Sequence[nn.Linear]) -> None:
    names = ", ".join(_FUSED)
    different: dict[str, set[Any]] = {
        "only some of {} have a bias": {one.bias is None for one in projections},
        "only some of {} are trained": {p.requires_grad for one in projections for p in one.parameters()},
        "{} have different dtypes": {p.dtype for one in projections for p in one.parameters()},
    }
    for message, values in different.items():
        if len(values) > 1:
            raise ArgumentError("", message.format(names))
    if any(one._forward_hooks or one._forward_pre_hooks or one._backward_hooks for one in projections):
        raise ArgumentError("", f"{names} have hooks, which one projection would not run")


def _transform(tensor: str, sizes: tuple[int, ...]) -> Convert:
    names = tuple(f"{name}.{tensor}" for name in _FUSED)
    fused = f"qkv_proj.{tensor}"
    return Convert(names, (fused,), _Join(names, fused), _Cut(names, fused, sizes))


@dataclass(frozen=True)
class _Join:
    names: tuple[str, ...]
    fused: str

    def __call__(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {self.fused: torch.cat([tensors[name] for name in self.names])}


@dataclass(frozen=True)
class _Cut:
    names: tuple[str, ...]
    fused: str
    sizes: tuple[int, ...]

    def __call__(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return dict(zip(self.names, tensors[self.fused].split(self.sizes), strict=True))
