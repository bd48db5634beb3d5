"""Replacements for the tests: good ones, and one for each way to be wrong."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hp_core import ArgumentError, Convert, Rename, ReplacementContext, module_replacement


class Norm(nn.Module):
    """RMSNorm over the last dimension, `x / rms(x) * weight`."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)


@module_replacement
def norm(module: Any, module_fqn: str, context: ReplacementContext, *, eps: float | None = None) -> nn.Module:
    if eps is not None and eps <= 0:
        raise ArgumentError("eps", f"must be positive, got {eps}")
    return Norm(module.weight, eps or module.variance_epsilon)


@module_replacement
class ClassNorm(Norm):
    """The same, as a class that is its own factory."""

    def __init__(self, module: Any, module_fqn: str, context: ReplacementContext) -> None:
        super().__init__(module.weight, module.variance_epsilon)


def broken(change: Callable[[Any, Norm], object]) -> Any:
    """A factory whose norm is spoilt by `change(module, replacement)`; what that returns is the result if not None."""

    @module_replacement
    def factory(module: Any, module_fqn: str, context: ReplacementContext) -> Any:
        built = Norm(module.weight, module.variance_epsilon)
        changed = change(module, built)
        return built if changed is None else changed

    return factory


def _set(name: str, value: Callable[[Any], Any]) -> Callable[[Any, Norm], None]:
    def change(module: Any, built: Norm) -> None:
        setattr(built, name, value(module))

    return change


def _raise(module: Any, built: Norm) -> None:
    raise ValueError("no such norm")


class _OtherCall(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


class _TwoArguments(Norm):
    def forward(self, hidden_states: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(hidden_states) * scale


class _NoForward(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class _Saves(Norm):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "eps"] = torch.tensor(self.eps)


lost_parameter = broken(lambda module, built: _emptied(built))
copied_parameter = broken(_set("weight", lambda module: nn.Parameter(module.weight.clone())))
other_dtype = broken(_set("weight", lambda module: nn.Parameter(module.weight.to(torch.bfloat16))))
other_shape = broken(_set("weight", lambda module: nn.Parameter(module.weight[:4].clone())))
frozen_copy = broken(_set("weight", lambda module: nn.Parameter(module.weight.clone(), requires_grad=False)))
added_parameter = broken(_set("bias", lambda module: nn.Parameter(torch.zeros_like(module.weight))))
added_buffer = broken(lambda module, built: built.register_buffer("scale", torch.ones(1)))
raises = broken(_raise)
returns_none = broken(lambda module, built: "nothing")
returns_source = broken(lambda module, built: module)
changes_source = broken(lambda module, built: _frozen(module))
other_call = broken(lambda module, built: _OtherCall(module.weight, 1e-6))
two_arguments = broken(lambda module, built: _TwoArguments(module.weight, 1e-6))
no_forward = broken(lambda module, built: _NoForward(module.weight))
saves_more = broken(lambda module, built: _Saves(module.weight, 1e-6))
exits = broken(lambda module, built: sys.exit(3))
loose_tensor = broken(_set("table", lambda module: torch.ones(3)))
contains_itself = broken(lambda module, built: built.add_module("inner", built))
deep_copy = broken(lambda module, built: copy.deepcopy(module))


def _frozen(module: Any) -> None:
    module.weight.requires_grad_(False)


def _emptied(built: Norm) -> Norm:
    del built.weight
    return built


@module_replacement
def same_for_all(module: Any, module_fqn: str, context: ReplacementContext) -> nn.Module:
    """One module for every hit, kept on the context's configuration, which the factory calls share."""
    context.model_config.shared_norm = context.model_config.__dict__.get("shared_norm") or Norm(module.weight, 1e-6)
    return context.model_config.shared_norm  # type: ignore[no-any-return]


class FusedMLP(nn.Module):
    """gate, up and down with gate and up in one matrix: another layout of the same numbers."""

    def __init__(self, mlp: Any, *, swap: bool = False) -> None:
        super().__init__()
        self.size = mlp.gate_proj.out_features
        self.gate_up_proj = nn.Linear(mlp.gate_proj.in_features, 2 * self.size, bias=False)
        self.down_proj = mlp.down_proj
        self.act_fn = mlp.act_fn
        self._swap = swap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).split(self.size, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)

    def weight_transforms(self) -> Sequence[Rename | Convert]:
        names = ("gate_proj.weight", "up_proj.weight")

        def fuse(tensors: Any) -> Any:
            return {"gate_up_proj.weight": torch.cat([tensors[name] for name in names])}

        def split(tensors: Any) -> Any:
            parts = tensors["gate_up_proj.weight"].split(self.size)
            return dict(zip(reversed(names) if self._swap else names, parts, strict=True))

        return [Convert(names, ("gate_up_proj.weight",), fuse, split)]


@module_replacement
def fused_mlp(module: Any, module_fqn: str, context: ReplacementContext, *, swap: bool = False) -> nn.Module:
    return FusedMLP(module, swap=swap)


class RenamedMLP(nn.Module):
    """The MLP with other names; `down` is the very module, `gate` and `up` are others."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(mlp.gate_proj.in_features, mlp.gate_proj.out_features, bias=False)
        self.up = nn.Linear(mlp.gate_proj.in_features, mlp.gate_proj.out_features, bias=False)
        self.down = mlp.down_proj
        self.act_fn = mlp.act_fn
        self.register_buffer("ones", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act_fn(self.gate(x)) * self.up(x) * self.ones.mean())

    def weight_transforms(self) -> Sequence[Rename | Convert]:
        return [Rename(f"{name}_proj.weight", f"{name}.weight") for name in ("gate", "up", "down")]

    def reset_buffers(self) -> None:
        self.ones.fill_(1.0)


@module_replacement
def renamed_mlp(module: Any, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return RenamedMLP(module)


class _KeepsOld(FusedMLP):
    """Its old projections are still there, as after `super().__init__` of the class it replaces."""

    def __init__(self, mlp: Any) -> None:
        super().__init__(mlp)
        self.gate_proj, self.up_proj = mlp.gate_proj, mlp.up_proj


@module_replacement
def keeps_old(module: Any, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return _KeepsOld(module)


class NormWithTable(Norm):
    """A norm in the original layout with a buffer of its own; it says so in two ways."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__(weight, eps)
        self.register_buffer("ones", torch.ones(3), persistent=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * self.ones.mean()

    def reset_buffers(self) -> None:
        self.ones.fill_(1.0)


class NormWithNoTransforms(NormWithTable):
    def weight_transforms(self) -> Sequence[Rename | Convert]:
        return []


@module_replacement
def norm_with_table(module: Any, module_fqn: str, context: ReplacementContext, *, empty: bool = False) -> nn.Module:
    return (NormWithNoTransforms if empty else NormWithTable)(module.weight, module.variance_epsilon)


class FusedLayer(LlamaDecoderLayer):
    """A decoder layer with a fused MLP inside, whose transforms it declares as its own."""

    def __init__(self, layer: Any) -> None:
        nn.Module.__init__(self)
        vars(self).update({name: value for name, value in vars(layer).items() if not name.startswith("_")})
        for name, child in layer.named_children():
            self.add_module(name, FusedMLP(child) if name == "mlp" else child)

    def weight_transforms(self) -> Sequence[Rename | Convert]:
        (one,) = FusedMLP.weight_transforms(self.mlp)
        assert isinstance(one, Convert)

        def inside(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(tensors: Any) -> Any:
                bare = {name.removeprefix("mlp."): value for name, value in tensors.items()}
                return {f"mlp.{name}": value for name, value in function(bare).items()}

            return call

        originals, replaced = ([f"mlp.{name}" for name in side] for side in (one.originals, one.replaced))
        return [Convert(tuple(originals), tuple(replaced), inside(one.forward), inside(one.backward))]


@module_replacement
def fused_layer(module: Any, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return FusedLayer(module)


class _OtherLayer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, child in layer.named_children():
            self.add_module(name, child)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        use_cache: Any = False,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        return hidden_states


@module_replacement
def other_layer(module: Any, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return _OtherLayer(module)


class _RenamedRouter(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        self.router, self.experts = block.gate, block.experts

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.flatten(0, 1)
        _, weights, chosen = self.router(rows)
        return self.experts(rows, chosen, weights).view_as(hidden_states)

    def weight_transforms(self) -> Sequence[Rename | Convert]:
        return [Rename("gate.weight", "router.weight")]


@module_replacement
def renamed_router(module: Any, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return _RenamedRouter(module)


class _WithoutReset(FusedMLP):
    def __init__(self, mlp: Any) -> None:
        super().__init__(mlp)
        self.register_buffer("table", torch.ones(3), persistent=False)


class _Wrong(FusedMLP):
    """A fused MLP whose transforms are given from outside."""

    def __init__(self, mlp: Any, transforms: Callable[[FusedMLP], Sequence[Rename | Convert]]) -> None:
        super().__init__(mlp)
        self._transforms = transforms

    def weight_transforms(self) -> Sequence[Rename | Convert]:
        return self._transforms(self)


def wrong_mlp(transforms: Callable[[FusedMLP], Sequence[Rename | Convert]] | None) -> Any:
    @module_replacement
    def factory(module: Any, module_fqn: str, context: ReplacementContext) -> nn.Module:
        if transforms is None:
            return _WithoutReset(module)
        return _Wrong(module, lambda built: transforms(built))

    return factory


def _good(built: FusedMLP) -> Convert:
    (one,) = FusedMLP.weight_transforms(built)
    assert isinstance(one, Convert)
    return one


def _edited(**changes: Any) -> Callable[[FusedMLP], Sequence[Rename | Convert]]:
    def transforms(built: FusedMLP) -> Sequence[Rename | Convert]:
        return [dataclasses.replace(_good(built), **changes)]

    return transforms


without_reset = wrong_mlp(None)
misses_one = wrong_mlp(_edited(originals=("gate_proj.weight",)))
unknown_original = wrong_mlp(_edited(originals=("gate_proj.weight", "left_proj.weight")))
unknown_replaced = wrong_mlp(_edited(replaced=("fused.weight",)))
twice = wrong_mlp(lambda built: [_good(built), _good(built)])
lossy = wrong_mlp(
    _edited(
        forward=lambda tensors: {"gate_up_proj.weight": torch.cat(list(tensors.values())).bfloat16().float()},
    )
)
wrong_shape = wrong_mlp(
    _edited(forward=lambda tensors: {"gate_up_proj.weight": torch.cat(list(tensors.values()), dim=1)})
)
other_names = wrong_mlp(_edited(forward=lambda tensors: {"fused": torch.cat(list(tensors.values()))}))
failing = wrong_mlp(_edited(forward=lambda tensors: {"gate_up_proj.weight": tensors["gate"]}))


class Experts(nn.Module):
    """The experts of Qwen3-MoE with gate and up apart, computed one expert after another."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.num_experts = experts.num_experts
        size, hidden = experts.intermediate_dim, experts.hidden_dim
        self.gate = nn.Parameter(torch.empty(self.num_experts, size, hidden))
        self.up = nn.Parameter(torch.empty(self.num_experts, size, hidden))
        self.down_proj = experts.down_proj

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            state = hidden_states[token]
            inner = F.silu(state @ self.gate[expert].T) * (state @ self.up[expert].T)
            out = out.index_add(0, token, (inner @ self.down_proj[expert].T) * top_k_weights[token, place, None])
        return out

    def weight_transforms(self) -> Sequence[Rename | Convert]:
        def split(tensors: Any) -> Any:
            gate, up = tensors["gate_up_proj"].chunk(2, dim=1)
            return {"gate": gate, "up": up}

        def fuse(tensors: Any) -> Any:
            return {"gate_up_proj": torch.cat([tensors["gate"], tensors["up"]], dim=1)}

        return [Convert(("gate_up_proj",), ("gate", "up"), split, fuse)]


@module_replacement
def split_experts(module: Any, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return Experts(module)


class Router(nn.Module):
    """A router of another class, which transformers would not find when it collects router logits."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight = router.weight

    def forward(self, hidden_states: torch.Tensor) -> Any:
        return hidden_states


@module_replacement
def other_router(module: Any, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return Router(module)
