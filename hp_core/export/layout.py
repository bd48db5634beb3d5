"""How the tensors of a run's checkpoint become those that transformers has on disk, some at a time."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    apply_converters,
    revert_weight_conversion,
)

from hp_core.errors import RunError
from hp_core.export.adapter import Adapters
from hp_core.model.replacement.contract import Tensors, WeightTransform, transforms_of


@dataclass(frozen=True)
class Transformed:
    """One weight transform of a replaced module, with whole names."""

    dot: str
    transform: WeightTransform

    @property
    def originals(self) -> list[str]:
        """The names of the original module's tensors."""
        return [self.dot + name for name in self.transform.originals]

    @property
    def replacements(self) -> list[str]:
        """The names of the replacement's tensors."""
        return [self.dot + name for name in self.transform.replacements]

    def to_original(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The original tensors, out of some that hold the replacement's."""
        own = {name: tensors[self.dot + name] for name in self.transform.replacements}
        return {self.dot + name: value for name, value in self.transform.to_original(own).items()}


@dataclass(frozen=True)
class Unit:
    """Tensors that are converted together: the run's names, and what they become, on the meta device."""

    sources: tuple[str, ...]
    outputs: Mapping[str, torch.Tensor]


@dataclass
class DiskLayout:
    """The way from a run's tensors to those on disk: adapters, replaced modules, ties, transformers' own layout.

    Attributes:
        skeleton: the model of transformers on the meta device, as plain transformers makes it from its configuration.
        transforms: those of replaced modules, with the plain model's names.
        adapters: what is merged.
        dtype: that of the files; what transformers keeps in float32 is kept so.
    """

    skeleton: PreTrainedModel
    transforms: Sequence[Transformed] = ()
    adapters: Adapters = field(default_factory=Adapters)
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        # Found once: transformers looks through the whole model for it, and is asked for every unit.
        conversions = conversions_of(self.skeleton)
        self.skeleton._weight_conversions = conversions  # type: ignore[assignment]  # an attribute of their own
        self._converters: list[Any] = [
            one.reverse_transform() for one in reversed(conversions or []) if isinstance(one, WeightConverter)
        ]
        self._ties = ties_of(self.skeleton)
        self._float32 = [re.compile(rf"(^|\.){re.escape(part)}") for part in self._kept_in_float32()]

    def convert(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The tensors on disk out of the run's tensors of one unit.

        Raises:
            RunError: two that the configuration ties are not the same.
        """
        plain = to_plain(tensors, self.transforms, self.adapters)
        for name, source in self._ties.items():
            if name in plain and source in plain:
                tied = plain.pop(name)
                if tied.device.type != "meta" and not torch.equal(tied, plain[source]):
                    raise RunError(f"{name!r} and {source!r} differ, and the model's configuration ties them")
        plain = {name: self._cast(name, value) for name, value in plain.items() if not self._is_left_out(name)}
        # Called by name and layout of the whole model, so any part that is closed under its conversions will do.
        found: dict[str, torch.Tensor] = revert_weight_conversion(self.skeleton, plain) if plain else {}
        return {name: value.contiguous() for name, value in found.items()}

    def units(self, stored: Tensors) -> list[Unit]:
        """All of the run's tensors in groups that are converted together, in the order of the model.

        Args:
            stored: the run's tensors, on the meta device.
        """
        sources = self.adapters.sources(stored)
        groups = _Groups(stored)
        for needed in sources.values():
            groups.join(needed)
        for one in self.transforms:
            made_of = [name for plain in one.replacements for name in sources[plain]]
            groups.join(made_of)
            sources |= dict.fromkeys(one.originals, tuple(made_of))
            for plain in set(one.replacements) - set(one.originals):
                del sources[plain]
        for name, source in self._ties.items():
            if name in sources and source in sources:
                groups.join((sources[name][0], sources[source][0]))
        converted: dict[str, str] = {}
        for name, needed in sources.items():
            key, pattern = apply_converters(name, self._converters)
            if pattern is not None:
                groups.join((converted.setdefault(key, needed[0]), needed[0]))
        units = []
        for names in sorted(groups.all(), key=lambda names: _natural(self.adapters.plain(names[0]))):
            units.append(Unit(tuple(names), self.convert({name: stored[name] for name in names})))
        return units

    def _kept_in_float32(self) -> Iterable[str]:
        return self.skeleton._get_dtype_plan(self.dtype) if self.dtype is not None else ()

    def _cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if self.dtype is None or not tensor.is_floating_point():
            return tensor
        kept = any(pattern.search(name) for pattern in self._float32)
        return tensor.to(torch.float32 if kept else self.dtype)

    def _is_left_out(self, name: str) -> bool:
        return name in (self.skeleton._keys_to_ignore_on_save or ())


def to_plain(tensors: Tensors, transforms: Sequence[Transformed], adapters: Adapters) -> dict[str, torch.Tensor]:
    """The plain model's own tensors out of a run's: adapters merged and replaced modules undone."""
    names = [name for name, sources in adapters.sources(tensors).items() if all(one in tensors for one in sources)]
    plain = adapters.merge(tensors, names)
    for one in transforms:
        if all(name in plain for name in one.replacements):
            made = one.to_original(plain)
            for name in one.replacements:
                del plain[name]
            plain.update(made)
    return plain


class _Groups:
    """Names in groups, of which some are joined."""

    def __init__(self, names: Iterable[str]) -> None:
        self._group = {name: [name] for name in names}

    def join(self, names: Sequence[str]) -> None:
        first = self._group[names[0]]
        for name in names[1:]:
            other = self._group[name]
            if other is not first:
                first += other
                for one in other:
                    self._group[one] = first

    def all(self) -> list[list[str]]:
        found = {id(group): sorted(group, key=_natural) for group in self._group.values()}
        return list(found.values())


def plain_class(model: nn.Module) -> type[Any]:
    """The class that a model had before FSDP2 gave it another."""
    return next(one for one in type(model).__mro__ if not issubclass(one, FSDPModule))


def skeleton_of(kind: type[PreTrainedModel], config: object, dtype: torch.dtype) -> PreTrainedModel:
    """The model that plain transformers makes of a configuration, on the meta device."""
    with torch.device("meta"):
        skeleton: PreTrainedModel = kind._from_config(copy.deepcopy(config), dtype=dtype)
    return skeleton


def conversions_of(skeleton: PreTrainedModel) -> list[Any] | None:
    """How transformers makes the model's tensors of those on disk; what it takes itself to save a model it made."""
    mapping = get_model_conversion_mapping(skeleton, add_legacy=False)
    return [one for one in mapping if not isinstance(one, PrefixChange)] or None


def ties_of(skeleton: PreTrainedModel) -> dict[str, str]:
    """The tensors that are another one by the model's configuration, and which; only the other is on disk."""
    tensors = skeleton.state_dict(keep_vars=True)
    declared: Mapping[str, str] = skeleton.get_expanded_tied_weights_keys(all_submodels=True)
    return {name: source for name, source in declared.items() if tensors.get(name) is tensors.get(source, skeleton)}


def transformed(module: nn.Module, dot: str = "") -> Iterator[Transformed]:
    """The weight transforms in a model; those of the outermost modules speak for all that is inside."""
    found = transforms_of(module)
    if found:
        yield from (Transformed(dot, one) for one in found)
        return
    for name, child in module.named_children():
        yield from transformed(child, f"{dot}{name}.")


def _natural(name: str) -> list[tuple[int, str | int]]:
    """A key that puts layer 10 behind layer 9."""
    return [(1, int(part)) if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
