"""What the author of a replacement works with: the decorator, the context, and transforms of weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch.distributed.device_mesh import DeviceMesh

from hp_core.config.importing import REPLACEMENT_MARK
from hp_core.config.target import Target

Factory = TypeVar("Factory", bound=Callable[..., Any])
Tensors: TypeAlias = Mapping[str, torch.Tensor]

_GIVEN = ("module", "module_fqn", "context")


def module_replacement(factory: Factory) -> Factory:
    """Mark a function or class as the factory of a replacement, so that `plan_overrides` may name it.

    It is called with the keywords `module` (the `nn.Module` in the model, on the meta device), `module_fqn` (its
    dotted name) and `context` (a `ReplacementContext`), and with the arguments that the recipe writes. It returns
    the `nn.Module` to install.

    Raises:
        TypeError: it doesn't declare the three, or takes `**kwargs`, which would swallow misspelt arguments.
    """
    return marked(factory, REPLACEMENT_MARK, "module replacement", _GIVEN)


def marked(function: Factory, mark: str, kind: str, needed: Sequence[str]) -> Factory:
    """`function` with the mark by which recipes know its kind.

    Raises:
        TypeError: it doesn't declare what is `needed`, or takes `**kwargs`.
    """
    parameters = inspect.signature(function).parameters
    name = getattr(function, "__qualname__", repr(function))
    if missing := [one for one in needed if one not in parameters]:
        raise TypeError(f"the {kind} {name} must declare {', '.join(missing)}")
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        raise TypeError(f"the {kind} {name} must declare its arguments by name, without **kwargs")
    setattr(function, mark, True)
    return function


@dataclass(frozen=True)
class ReplacementContext:
    """What a factory may want to know about the model and the run. Nothing in it changes either of them.

    `layer_index` is the first number in the module's name, None outside of layers. `model_config` is a copy of the
    model's configuration, None where it has none. `sizes` are the parallel sizes by axis (`dp_replicate`,
    `dp_shard`, `tp`, `cp`, `ep`, `pp`) and `mesh` is the mesh of the data axes. `device` is where the model will
    live and `dtype` the type of its master weights. `target` is the recipe's `replace_module`.
    """

    layer_index: int | None
    model_config: Any
    sizes: Mapping[str, int]
    mesh: DeviceMesh | None
    device: torch.device
    dtype: torch.dtype
    target: Target | None = None


@dataclass(frozen=True)
class Rename:
    """One tensor under another name. Both names are relative to the module (`gate.weight`)."""

    original: str
    replaced: str

    @property
    def originals(self) -> tuple[str, ...]:
        """The name in the original module."""
        return (self.original,)

    @property
    def replacements(self) -> tuple[str, ...]:
        """The name in the replacement."""
        return (self.replaced,)

    def to_replaced(self, tensors: Tensors) -> Tensors:
        """From the original layout to the replacement's."""
        return {self.replaced: tensors[self.original]}

    def to_original(self, tensors: Tensors) -> Tensors:
        """From the replacement's layout to the original one."""
        return {self.original: tensors[self.replaced]}


@dataclass(frozen=True)
class Convert:
    """Some tensors made of others: the names on both sides, relative to the module, and the way there and back.

    `forward` takes the whole original tensors by name and returns the replacement's; `backward` is its inverse, bit
    for bit. Both keep dtypes, leave their arguments alone and work on tensors of any device, meta included.
    """

    originals: tuple[str, ...]
    replaced: tuple[str, ...]
    forward: Callable[[Tensors], Tensors]
    backward: Callable[[Tensors], Tensors]

    @property
    def replacements(self) -> tuple[str, ...]:
        """The names in the replacement."""
        return self.replaced

    def to_replaced(self, tensors: Tensors) -> Tensors:
        """From the original layout to the replacement's."""
        return self.forward({name: tensors[name] for name in self.originals})

    def to_original(self, tensors: Tensors) -> Tensors:
        """From the replacement's layout to the original one."""
        return self.backward({name: tensors[name] for name in self.replaced})


WeightTransform: TypeAlias = Rename | Convert


@runtime_checkable
class ChangesLayout(Protocol):
    """A replacement that holds its weights under other names or in other shapes than the original module."""

    def weight_transforms(self) -> Sequence[WeightTransform]:
        """Return how each tensor that differs is made of the original ones, and back."""
        ...


@runtime_checkable
class ResetsBuffers(Protocol):
    """A replacement with buffers of its own that no checkpoint holds."""

    def reset_buffers(self) -> None:
        """Fill them, on whatever device they are; called once the module has left the meta device."""
        ...


def transforms_of(module: torch.nn.Module) -> tuple[WeightTransform, ...]:
    """Return the weight transforms that a module declares, none for any other module."""
    # Asking a runtime protocol takes longer than building a norm, so a module without the method isn't asked.
    named = any("weight_transforms" in vars(kind) for kind in type(module).__mro__)
    if named and isinstance(module, ChangesLayout):
        return tuple(module.weight_transforms())
    return ()
