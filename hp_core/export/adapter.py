"""Adapters of the library `peft` in a model: where their weights lie, and the plain weights they add up to."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from hp_core.model.replacement.contract import Tensors

# What `PeftModel` and its tuner put before the names of the model inside.
_WRAPPER = "base_model.model."


class MergeError(Exception):
    """Weights of adapters that don't add up to plain weights; the message says why."""


@dataclass(frozen=True)
class LowRank:
    """What one adapter adds to a weight: `scaling * (up @ down)`, transposed where the layer keeps (in, out)."""

    down: str
    up: str
    scaling: float
    transposed: bool


@dataclass(frozen=True)
class Merged:
    """A plain tensor: the run's tensor that it is made of, and what adapters add."""

    base: str
    added: tuple[LowRank, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """The run's tensors that it takes."""
        return (self.base, *(name for one in self.added for name in (one.down, one.up)))

    def of(self, tensors: Tensors) -> torch.Tensor:
        """The plain tensor, added up in float32 or better."""
        base = tensors[self.base]
        if not self.added or base.device.type == "meta":
            return base
        dtype = torch.promote_types(base.dtype, torch.float32)
        total = base.to(dtype, copy=True)
        for one in self.added:
            product = tensors[one.up].to(dtype) @ tensors[one.down].to(dtype)
            total += one.scaling * (product.T if one.transposed else product)
        return total.to(base.dtype)


@dataclass(frozen=True)
class Adapters:
    """How the tensors of a model with adapters become those of the plain one; without any, they are the same.

    `merged` are the plain names whose tensors are made of others; `consumed` the run's tensors that have no plain
    name of their own. Whatever else there is keeps its name, but for `prefix`.
    """

    prefix: str = ""
    merged: Mapping[str, Merged] = field(default_factory=dict)
    consumed: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        """The plain names of the modules that adapters were merged into."""
        return sorted({name.rpartition(".")[0] for name, one in self.merged.items() if one.added})

    @classmethod
    def of(cls, model: nn.Module) -> Adapters:
        """The adapters in a model, those that are active.

        Raises:
            MergeError: they are of a kind that no plain weights compute.
        """
        if "peft" not in sys.modules:
            return cls()
        return _Search(model).found()

    def plain(self, name: str) -> str:
        """What a tensor or module that has no adapter is called in the plain model."""
        return name.removeprefix(self.prefix)

    def plain_dot(self, dot: str) -> str:
        """What a module is called in the plain model, with a dot behind it; adapters wrap what they change."""
        return self.plain(dot).replace(".base_layer.", ".")

    def sources(self, stored: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """The tensors of the plain model, and those of the run that each is made of."""
        found = {self.plain(name): (name,) for name in stored if name not in self.consumed}
        return {**found, **{name: one.sources for name, one in self.merged.items()}}

    def merge(self, tensors: Tensors, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """The plain tensors of these names, from those of the run."""
        return {name: self._plain_tensor(tensors, name) for name in names}

    def _plain_tensor(self, tensors: Tensors, name: str) -> torch.Tensor:
        if name in self.merged:
            return self.merged[name].of(tensors)
        return tensors[self.prefix + name] if self.prefix + name in tensors else tensors[name]

    def as_dict(self) -> dict[str, Any]:
        """A form that JSON can hold."""
        return {"prefix": self.prefix, "merged": _plain(self.merged), "consumed": sorted(self.consumed)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Adapters:
        """The inverse of `as_dict`."""
        merged = {
            name: Merged(one["base"], tuple(LowRank(**added) for added in one["added"]))
            for name, one in values["merged"].items()
        }
        return cls(values["prefix"], merged, frozenset(values["consumed"]))


def _plain(merged: Mapping[str, Merged]) -> dict[str, Any]:
    return {name: asdict(one) for name, one in merged.items()}


class _Search:
    """Looks through a model for what `peft` has put into it."""

    def __init__(self, model: nn.Module) -> None:
        from peft import PeftModel
        from peft.tuners.lora import LoraLayer
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        self.model = model
        self.prefix = _WRAPPER if isinstance(model, PeftModel) else ""
        self.lora, self.tuner = LoraLayer, BaseTunerLayer
        self.wrapper, self.copied = AuxiliaryTrainingWrapper, ModulesToSaveWrapper
        self.merged: dict[str, Merged] = {}
        self.consumed: set[str] = set()

    def found(self) -> Adapters:
        """Everything, with the names of a checkpoint.

        Raises:
            MergeError: there is an adapter of another kind.
        """
        stored = list(self.model.state_dict(keep_vars=True))
        for fqn, module in self.model.named_modules():
            if isinstance(module, self.tuner):
                self._add_layer(fqn, module, stored)
            elif isinstance(module, self.wrapper):
                self._add_copy(fqn, module, stored)
        return Adapters(self.prefix, self.merged, frozenset(self.consumed))

    def _add_layer(self, fqn: str, layer: Any, stored: Sequence[str]) -> None:
        active = [name for name in layer.active_adapters if name in getattr(layer, "lora_A", {})]
        if not isinstance(layer, self.lora) or not isinstance(layer.base_layer, nn.Linear) or layer.lora_embedding_A:
            raise MergeError(f"{fqn} is a {type(layer).__name__} of peft, and only LoRA of linear layers is merged")
        for name in active:
            if getattr(layer, "lora_variant", {}).get(name) is not None or layer.lora_bias.get(name):
                raise MergeError(f"{fqn}: the adapter {name!r} of peft is no plain LoRA (DoRA, a bias)")
        plain = self._plain(fqn)
        own = [name for name in stored if name.startswith(f"{fqn}.")]
        self.consumed.update(own)
        for name in own:
            if name.startswith(f"{fqn}.base_layer."):
                self.merged[f"{plain}.{name.removeprefix(f'{fqn}.base_layer.')}"] = Merged(name)
        # What is merged already is in the base layer's weight.
        added = [name for name in active if name not in layer.merged_adapters and not layer.disable_adapters]
        self.merged[f"{plain}.weight"] = Merged(
            f"{fqn}.base_layer.weight", tuple(self._low_rank(fqn, layer, name) for name in added)
        )

    @staticmethod
    def _low_rank(fqn: str, layer: Any, name: str) -> LowRank:
        down, up = (f"{fqn}.lora_{side}.{name}.weight" for side in "AB")
        return LowRank(down, up, scaling=float(layer.scaling[name]), transposed=bool(layer.fan_in_fan_out))

    def _add_copy(self, fqn: str, wrapper: Any, stored: Sequence[str]) -> None:
        """A module that is trained whole: its copy takes the place of the original."""
        if not isinstance(wrapper, self.copied):
            raise MergeError(f"{fqn} is a {type(wrapper).__name__} of peft, which isn't merged")
        active = [name for name in wrapper.active_adapters if name in wrapper.modules_to_save]
        uses_copy = bool(active) and not wrapper.disable_adapters
        inside = f"{fqn}.modules_to_save.{active[0]}." if uses_copy else f"{fqn}.original_module."
        for name in stored:
            if name.startswith(f"{fqn}."):
                self.consumed.add(name)
            if name.startswith(inside):
                self.merged[f"{self._plain(fqn)}.{name.removeprefix(inside)}"] = Merged(name)

    def _plain(self, fqn: str) -> str:
        return fqn.removeprefix(self.prefix)


def inner_model(model: nn.Module) -> nn.Module:
    """The model that `peft` has wrapped, or `model` itself."""
    if "peft" in sys.modules:
        from peft import PeftModel

        if isinstance(model, PeftModel):
            inner: nn.Module = model.get_base_model()
            return inner
    return model
