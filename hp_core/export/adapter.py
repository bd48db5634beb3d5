"""Adapters of the library `peft` in a model: where their weights lie, and the plain weights they add up to."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hp_core.model.replacement.contract import Tensors

# What `PeftModel` and its tuner put before the names of the model inside.
WRAPPER = "base_model.model."


class MergeError(Exception):
    """Weights of adapters that don't add up to plain weights; the message says why."""


@dataclass(frozen=True)
class LowRank:
    """What one adapter adds to a weight: `scaling * (up @ down)`, transposed where the layer keeps (in, out).

    `lengths` are those that DoRA gives the rows of the sum, as (out, in): Liu et al. 2024, equation 5.
    """

    down: str
    up: str
    scaling: float
    transposed: bool
    lengths: str | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        """The run's tensors that it is made of."""
        return (self.down, self.up) if self.lengths is None else (self.down, self.up, self.lengths)

    def on(self, weight: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """`weight`, in the layer's own layout, with the adapter."""
        rows = weight.T if self.transposed else weight
        rows = rows + self.scaling * (tensors[self.up].to(weight.dtype) @ tensors[self.down].to(weight.dtype))
        if self.lengths is not None:
            rows = rows * (tensors[self.lengths].to(weight.dtype) / torch.linalg.norm(rows, dim=1))[:, None]
        return rows.T if self.transposed else rows


@dataclass(frozen=True)
class Merged:
    """A plain tensor: the run's tensor that it is made of, and what adapters add."""

    base: str
    added: tuple[LowRank, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """The run's tensors that it takes."""
        return (self.base, *(name for one in self.added for name in one.sources))

    def of(self, tensors: Tensors) -> torch.Tensor:
        """The plain tensor, added up in float32 or better."""
        base = tensors[self.base]
        if not self.added or base.device.type == "meta":
            return base
        dtype = torch.promote_types(base.dtype, torch.float32)
        total = base.to(dtype)
        for one in self.added:
            total = one.on(total, tensors)
        return total.to(base.dtype).contiguous()


@dataclass(frozen=True)
class Adapters:
    """How the tensors of a model with adapters become those of the plain one; without any, they are the same.

    `merged` are the plain names whose tensors are made of others; `consumed` the run's tensors that have no plain
    name of their own. Whatever else there is keeps its name, but for `prefix`. `alone` are the run's tensors by the
    names that files of adapters alone have for them, and `config` is what `peft` makes such adapters of; both are
    empty where there is not exactly one adapter.
    """

    prefix: str = ""
    merged: Mapping[str, Merged] = field(default_factory=dict)
    consumed: frozenset[str] = frozenset()
    alone: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

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
        return {
            "prefix": self.prefix,
            "merged": _plain(self.merged),
            "consumed": sorted(self.consumed),
            "alone": dict(self.alone),
            "config": dict(self.config),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Adapters:
        """The inverse of `as_dict`."""
        merged = {
            name: Merged(one["base"], tuple(LowRank(**added) for added in one["added"]))
            for name, one in values["merged"].items()
        }
        consumed = frozenset(values["consumed"])
        # Runs before there were exports of adapters alone say nothing of them.
        return cls(values["prefix"], merged, consumed, values.get("alone", {}), values.get("config", {}))

    @classmethod
    def together(cls, parts: Sequence[Adapters]) -> Adapters:
        """Those of all stages of a pipeline."""
        merged = {name: one for part in parts for name, one in part.merged.items()}
        alone = {name: one for part in parts for name, one in part.alone.items()}
        consumed = frozenset(name for part in parts for name in part.consumed)
        return cls(parts[0].prefix, merged, consumed, alone, parts[0].config)


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
        self.prefix = WRAPPER if isinstance(model, PeftModel) else ""
        self.lora, self.tuner = LoraLayer, BaseTunerLayer
        self.wrapper, self.copied = AuxiliaryTrainingWrapper, ModulesToSaveWrapper
        self.merged: dict[str, Merged] = {}
        self.consumed: set[str] = set()
        self.alone: dict[str, str] = {}
        self.active: set[str] = set()

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
        if len(self.active) != 1:
            return Adapters(self.prefix, self.merged, frozenset(self.consumed))
        config = _config_of(self.model, *self.active)
        return Adapters(self.prefix, self.merged, frozenset(self.consumed), self.alone, config)

    def _add_layer(self, fqn: str, layer: Any, stored: Sequence[str]) -> None:
        if not isinstance(layer, self.lora) or not isinstance(layer.base_layer, (nn.Linear, Conv1D, nn.Embedding)):
            message = (
                f"{fqn} is a {type(layer).__name__} of peft, and only LoRA of linear layers and embeddings is merged"
            )
            raise MergeError(message)
        held = layer.lora_embedding_A or layer.lora_A
        active = [name for name in layer.active_adapters if name in held]
        for name in active:
            self._refuse_other_kinds(fqn, layer, name, len(active))
        plain = self._plain(fqn)
        own = [name for name in stored if name.startswith(f"{fqn}.")]
        self.consumed.update(own)
        for name in own:
            if name.startswith(f"{fqn}.base_layer."):
                self.merged[f"{plain}.{name.removeprefix(f'{fqn}.base_layer.')}"] = Merged(name)
        # What is merged already is in the base layer's weight.
        added = [name for name in active if name not in layer.merged_adapters and not layer.disable_adapters]
        low_ranks = [self._low_rank(fqn, layer, name) for name in added]
        self.merged[f"{plain}.weight"] = Merged(f"{fqn}.base_layer.weight", tuple(low_ranks))
        self.active.update(added)
        for name, one in zip(added, low_ranks, strict=True):
            for source in one.sources:
                path = source.removeprefix(f"{fqn}.").replace(f".{name}", "", 1)
                self.alone[f"{plain}.{path.removesuffix('.weight') if source == one.lengths else path}"] = source

    @staticmethod
    def _refuse_other_kinds(fqn: str, layer: Any, name: str, number: int) -> None:
        is_dora = name in layer.lora_magnitude_vector
        if layer.lora_bias.get(name) or (not is_dora and getattr(layer, "lora_variant", {}).get(name) is not None):
            raise MergeError(f"{fqn}: the adapter {name!r} of peft is neither LoRA nor DoRA alone")
        if is_dora and number > 1:
            raise MergeError(f"{fqn}: {number} adapters of peft at once, with DoRA, add up to no weight")

    @staticmethod
    def _low_rank(fqn: str, layer: Any, name: str) -> LowRank:
        is_embedding = bool(layer.lora_embedding_A)
        kind, leaf = ("lora_embedding", "") if is_embedding else ("lora", ".weight")
        down, up = (f"{fqn}.{kind}_{side}.{name}{leaf}" for side in "AB")
        lengths = f"{fqn}.lora_magnitude_vector.{name}.weight" if name in layer.lora_magnitude_vector else None
        # An embedding keeps a row for each token, which is what it takes in.
        return LowRank(down, up, float(layer.scaling[name]), is_embedding or bool(layer.fan_in_fan_out), lengths)

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
                plain = f"{self._plain(fqn)}.{name.removeprefix(inside)}"
                self.merged[plain] = Merged(name)
                if uses_copy:
                    self.alone[plain] = name

    def _plain(self, fqn: str) -> str:
        return fqn.removeprefix(self.prefix)


def _config_of(model: Any, name: str) -> dict[str, Any]:
    """What `peft` keeps of an adapter beside its weights, as JSON can hold it."""
    values = model.peft_config[name].to_dict()
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}
    values |= {"inference_mode": True, "base_model_name_or_path": inner_model(model).name_or_path or None}
    found: dict[str, Any] = json.loads(json.dumps(values))
    return found


def inner_model(model: nn.Module) -> nn.Module:
    """The model that `peft` has wrapped, or `model` itself."""
    if "peft" in sys.modules:
        from peft import PeftModel

        if isinstance(model, PeftModel):
            inner: nn.Module = model.get_base_model()
            return inner
    return model
