"""Replacements that each break one promise, and some that keep them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers.models.llama import modeling_llama

from hp_core import ArgumentError, Convert, Rename, ReplacementContext, module_replacement

Tensors = Mapping[str, torch.Tensor]


class Norm(nn.Module):
    """Keeps every promise."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)


def replacing_norms_by(kind: type[Norm], module: nn.Module) -> nn.Module:
    if not hasattr(module, "variance_epsilon"):
        raise ArgumentError("", f"{type(module).__name__} is no RMSNorm")
    return kind(module.weight, module.variance_epsilon)


@module_replacement
def norm(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return replacing_norms_by(Norm, module)


class FusedMLP(nn.Module):
    """Keeps every promise with weights in another layout, a renamed one, and a buffer that no checkpoint holds."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        inner, size = module.gate_proj.weight.shape
        self.both = nn.Parameter(torch.empty(2 * inner, size))
        self.down = nn.Module()
        self.down.weight = nn.Parameter(torch.empty(size, inner))
        self.register_buffer("scale", torch.ones(inner), persistent=False)

    def reset_buffers(self) -> None:
        self.scale.fill_(1.0)

    def weight_transforms(self) -> Sequence[Any]:
        names = ("gate_proj.weight", "up_proj.weight")
        return [Convert(names, ("both",), self.join, self.part), Rename("down_proj.weight", "down.weight")]

    @staticmethod
    def join(tensors: Tensors) -> Tensors:
        return {"both": torch.cat([tensors["gate_proj.weight"], tensors["up_proj.weight"]])}

    def part(self, tensors: Tensors) -> Tensors:
        gate, up = tensors["both"].chunk(2)
        return {"gate_proj.weight": gate.clone(), "up_proj.weight": up.clone()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, self.both).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up * self.scale.to(x.dtype), self.down.weight)


@module_replacement
def fused_mlp(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return FusedMLP(module)


class KnowsItsLayer(Norm):
    """Keeps every promise with numbers that it takes from the context."""

    def __init__(self, weight: nn.Parameter, eps: float, layer: int, layers: int) -> None:
        super().__init__(weight, eps)
        self.share = (layer + 1) / layers
        self.register_buffer("depth", torch.tensor(self.share), persistent=False)

    def reset_buffers(self) -> None:
        self.depth.fill_(self.share)


@module_replacement
def knows_its_layer(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    layers = context.model_config.num_hidden_layers
    return KnowsItsLayer(module.weight, module.variance_epsilon, context.layer_index, layers)


# replaces


class BypassesHooks(Norm):
    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.forward(hidden_states)


@module_replacement
def bypasses_hooks(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return replacing_norms_by(BypassesHooks, module)


# same_numbers


class IgnoresWeight(Norm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden_states, self.weight.shape, None, self.eps) + 0 * self.weight


@module_replacement
def ignores_weight(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return replacing_norms_by(IgnoresWeight, module)


class OtherEpsilon(Norm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, 10 * self.eps)


@module_replacement
def other_epsilon(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return replacing_norms_by(OtherEpsilon, module)


class DetachesWeight(Norm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden_states, self.weight.shape, self.weight.detach(), self.eps)


@module_replacement
def detaches_weight(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return replacing_norms_by(DetachesWeight, module)


class Leaning(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 1.0001 * gradient


class WrongBackward(Norm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return Leaning.apply(super().forward(hidden_states))


@module_replacement
def wrong_backward(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return replacing_norms_by(WrongBackward, module)


class HalvesInTraining(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = module.gate_proj, module.up_proj, module.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return found / 2 if self.training else found


@module_replacement
def halves_in_training(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return HalvesInTraining(module)


# same_state


class WritesWeight(Norm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.weight.data.mul_(1.0001)
        return super().forward(hidden_states)


@module_replacement
def writes_weight(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return replacing_norms_by(WritesWeight, module)


class Freezes(Norm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.weight.requires_grad_(False)
        return super().forward(hidden_states)


@module_replacement
def freezes(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return replacing_norms_by(Freezes, module)


@module_replacement
def copies_weight(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    """The engine refuses it, in whatever check it is built."""
    return Norm(nn.Parameter(module.weight.clone()), module.variance_epsilon)


class KeepsTensor(Norm):
    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__(weight, eps)
        self.numbers = torch.arange(4)


@module_replacement
def keeps_tensor(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    """The engine refuses this one, too."""
    return replacing_norms_by(KeepsTensor, module)


# meta_build


class LeavesJunk(FusedMLP):
    """Nothing reads the buffer yet, and nothing fills it."""

    def reset_buffers(self) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, self.both).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down.weight)


@module_replacement
def leaves_junk(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return LeavesJunk(module)


# half_precision


class StaysInFp32(Norm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden_states.float(), self.weight.shape, self.weight.float(), self.eps)


@module_replacement
def stays_in_fp32(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return replacing_norms_by(StaysInFp32, module)


class OverflowsInHalf(Norm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.dtype == torch.float32:
            return super().forward(hidden_states)
        return super().forward(hidden_states) * 1e38 * 1e38


@module_replacement
def overflows_in_half(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return replacing_norms_by(OverflowsInHalf, module)


class ShrinksInHalf(Norm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        found = super().forward(hidden_states)
        return found if found.dtype == torch.float32 else found * 0.1


@module_replacement
def shrinks_in_half(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return replacing_norms_by(ShrinksInHalf, module)


# export


class RemembersOriginals(FusedMLP):
    """Gives back what it was loaded from, whatever training has made of it."""

    def join(self, tensors: Tensors) -> Tensors:
        joined = super().join(tensors)
        if tensors["gate_proj.weight"].device.type != "meta":
            self.loaded = dict(tensors)
        return joined

    def part(self, tensors: Tensors) -> Tensors:
        return dict(self.loaded) if "loaded" in vars(self) else super().part(tensors)


@module_replacement
def remembers_originals(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return RemembersOriginals(module)


class Prepacks(Norm):
    """Doubles its weight at the first call, and halves what comes of it."""

    packed = False

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            self.weight.data.mul_(2.0)
            self.packed = True
        return super().forward(hidden_states) / 2


@module_replacement
def prepacks(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return replacing_norms_by(Prepacks, module)


# second_model_untouched


def patched_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


@module_replacement
def patches_class(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    """Every time in the same way, so that a second call changes nothing."""
    built = replacing_norms_by(Norm, module)
    # After the refusal of what is no norm: a test puts back the forward of this one class only.
    type(module).forward = patched_forward
    return built


@module_replacement
def patches_module(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    original = modeling_llama.apply_rotary_pos_emb
    modeling_llama.apply_rotary_pos_emb = lambda *args, **kwargs: original(*args, **kwargs)
    return replacing_norms_by(Norm, module)


# refusals


@module_replacement
def takes_anything(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return Norm(module.weight, 1e-6)


@module_replacement
def stumbles(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return Norm(module.weight, module.variance_epsilon)


# two_ranks, sharded_export


class OtherOnRanks(Norm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * (1 if dist.get_world_size() == 1 else 1.001)


@module_replacement
def other_on_ranks(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return replacing_norms_by(OtherOnRanks, module)


class SavesOtherwiseOnRanks(Norm):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if dist.get_world_size() > 1:
            destination[f"{prefix}weight"] = destination[f"{prefix}weight"] * 2


@module_replacement
def saves_otherwise_on_ranks(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    return replacing_norms_by(SavesOtherwiseOnRanks, module)
