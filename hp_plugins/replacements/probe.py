"""Trying out a module on the meta device: a small real one with the same code and settings takes its place.

A check compares the code that a replacement would run with the original class's own forward. What it finds depends on
nothing but `Facts`, which are hashable, so a model of a hundred equal layers is checked once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import nn

_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, FunctionType, BuiltinFunctionType, partial})
_EVERY_MODULE_HAS = frozenset(vars(nn.Module()))

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Facts:
    """What a module is, apart from the numbers in its tensors.

    `attributes` are the plain ones, with their types, as 1 equals True. Others, such as a configuration, are left
    out: code that needs them fails on the probe, and a module that can't be tried is not replaced.
    """

    kind: type[nn.Module]
    attributes: tuple[tuple[str, type, Any], ...]
    parameters: tuple[tuple[str, Shape | None], ...]
    children: tuple[tuple[str, Facts], ...]

    @classmethod
    def of(cls, module: nn.Module, without: frozenset[str] = frozenset()) -> Facts:
        """Look at a module. Attributes and children named in `without` make no difference to its code."""
        ignored = _EVERY_MODULE_HAS | without if without else _EVERY_MODULE_HAS
        attributes = [
            (name, type(value), value)
            for name, value in vars(module).items()
            if type(value) in _PLAIN and name not in ignored
        ]
        children = []
        for name, child in module._modules.items():
            if child is None:
                attributes.append((name, type(None), None))
            elif name not in without:
                children.append((name, Facts.of(child)))
        parameters = tuple([(name, _shape(one)) for name, one in module._parameters.items()])
        return cls(type(module), tuple(attributes), parameters, tuple(children))

    def attribute(self, name: str) -> Any:
        """The value of a plain attribute, None if there is none."""
        return next((value for key, _, value in self.attributes if key == name), None)

    def shape(self, name: str) -> Shape:
        """The shape of a parameter, empty if there is none."""
        return next((shape for key, shape in self.parameters if key == name and shape is not None), ())

    def build(self, shapes: Mapping[str, Shape] | None = None, prefix: str = "", seed: int = 0) -> Any:
        """Return a module of this kind with random fp32 parameters, in evaluation mode, without running `__init__`.

        Args:
            shapes: other shapes for parameters, by name (`q_proj.weight`): a probe may be smaller.
            prefix: what stands before the names in `shapes`.
            seed: of the random numbers.
        """
        module: Any = self.kind.__new__(self.kind)
        nn.Module.__init__(module)
        for name, _, value in self.attributes:
            setattr(module, name, value)
        for name, shape in self.parameters:
            seed += 1
            wanted = None if shape is None else (shapes or {}).get(prefix + name, shape)
            value = None if wanted is None else nn.Parameter(random(*wanted, seed=seed), requires_grad=False)
            module.register_parameter(name, value)
        for name, child in self.children:
            seed += 1
            module.add_module(name, child.build(shapes, f"{prefix}{name}.", seed * 31))
        return module.eval()


@dataclass(frozen=True)
class Settings:
    """The plain values of a configuration, and the names of its others, which a probe's code can't ask for."""

    kind: type
    plain: tuple[tuple[str, type, Any], ...]
    others: frozenset[str]

    @classmethod
    def of(cls, config: Any) -> Settings:
        """Look at a configuration; what is private, such as the attention function, is left out."""
        values = [(name, value) for name, value in vars(config).items() if not name.startswith("_")]
        plain = tuple([(name, type(value), value) for name, value in values if type(value) in _PLAIN])
        return cls(type(config), plain, frozenset([name for name, value in values if type(value) not in _PLAIN]))

    def build(self, **more: Any) -> Any:
        """Return a configuration with the plain values and these."""
        return _Config(self, {name: value for name, _, value in self.plain} | more)


class _Config(SimpleNamespace):
    def __init__(self, settings: Settings, values: Mapping[str, Any]) -> None:
        super().__init__(**values)
        vars(self)["_settings"] = settings

    def __getattr__(self, name: str) -> Any:
        settings: Settings = vars(self)["_settings"]
        other_name = getattr(settings.kind, "attribute_map", {}).get(name)
        if other_name is not None:
            return getattr(self, other_name)
        if name in settings.others or hasattr(settings.kind, name):
            # No AttributeError, by which getattr would take its default for the real value.
            raise LookupError(f"reads {name} of its config")
        raise AttributeError(f"the config has no {name}")


@contextmanager
def on_cpu() -> Iterator[None]:
    """Make and compute plain fp32 tensors on the CPU without a graph, whatever a model is being built with.

    What is drawn inside, such as dropout, leaves the numbers drawn afterwards as they would have been.
    """
    usual, threads = torch.get_default_dtype(), torch.get_num_threads()
    drawn = torch.default_generator.get_state()
    torch.set_default_dtype(torch.float32)
    # Starting a pool of threads for a few numbers takes longer than planning a model.
    torch.set_num_threads(1)
    try:
        with torch.device("cpu"), torch.no_grad():
            yield
    finally:
        torch.default_generator.set_state(drawn)
        torch.set_default_dtype(usual)
        torch.set_num_threads(threads)


def _shape(tensor: torch.Tensor | None) -> Shape | None:
    return None if tensor is None else tuple(tensor.shape)


def random(*shape: int, seed: int) -> torch.Tensor:
    """Standard normal fp32 numbers on the CPU from a stream of their own."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def differs(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-5) -> bool:
    """Whether two results differ by more than rounding, measured by the largest number among them."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return True
    return not bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max())


def failure(error: Exception) -> str:
    """Say in one line that the original's code could not be tried, and why."""
    return f"can't be tried out on its own ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
