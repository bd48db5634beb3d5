"""Sequence parallelism in a plan: between its regions, each rank has a part of every sequence.

Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models). The embedding and what a model
computes beside its layers (masks, rotary embeddings) stay whole; the layers see parts from the first to the last norm.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from torch import nn
from transformers import PreTrainedModel

from hp_core.errors import InputError, Problem
from hp_core.model.units import blocks
from hp_core.parallel.plan.boundary import Boundary
from hp_core.parallel.plan.edge import PARTIAL, REPLICATE, Edge, shard

_PATH = "accelerator.sequence_parallel"
PART = shard(1)


@runtime_checkable
class Drops(Protocol):
    """A layer that drops parts of its hidden states in its own forward, by this probability."""

    dropout: float


@dataclass(frozen=True)
class _Layers:
    """Where sequences are cut: at the first layer, and whole again after the last, or after the norm behind it."""

    layers: Mapping[str, nn.Module]
    last: str
    last_module: nn.Module
    features: int
    itemsize: int

    def edge(self, name: str, *, inward: bool) -> Edge:
        src, dst = (REPLICATE, PART) if inward else (PART, REPLICATE)
        return Edge(name, src, dst, self.features, self.itemsize)


def on_sequences(
    model: PreTrainedModel, boundaries: Sequence[Boundary], first_layers: Sequence[int] = (0,)
) -> list[Boundary]:
    """The boundaries with sequences cut between the regions.

    Args:
        model: the whole model.
        boundaries: those without.
        first_layers: those of the stages of a pipeline, between which sequences travel whole.

    Raises:
        InputError: the model's layers are not understood well enough.
    """
    layers = _layers(model)
    planned = {one.fqn: one for one in boundaries}
    for fqn, layer in layers.layers.items():
        _refuse_own(fqn, layer)
        for name, child in layer.named_children():
            _plan_child(planned, f"{fqn}.{name}", child, layers)
    names = list(layers.layers)
    for index in first_layers:
        entry = (layers.edge(_argument(layers.layers[names[index]]), inward=True),)
        planned[names[index]] = replace(_end_of(names[index], planned, layers), inputs=entry)
        if index > 0:
            before = names[index - 1]
            planned[before] = replace(_end_of(before, planned, layers), output=layers.edge("", inward=False))
    _plan_end(planned, layers)
    order = {fqn: index for index, (fqn, _) in enumerate(model.named_modules())}
    return sorted(planned.values(), key=lambda one: order[one.fqn])


def _plan_end(planned: dict[str, Boundary], layers: _Layers) -> None:
    output = layers.edge("", inward=False)
    if layers.last not in layers.layers:
        planned[layers.last] = _on_parts(planned[layers.last], layers.last_module, layers, output)
        return
    planned[layers.last] = replace(_end_of(layers.last, planned, layers), output=output)


def _end_of(fqn: str, planned: Mapping[str, Boundary], layers: _Layers) -> Boundary:
    return planned.get(fqn, Boundary(fqn, "sequence", type(layers.layers[fqn]).__name__, ()))


def _plan_child(planned: dict[str, Boundary], fqn: str, child: nn.Module, layers: _Layers) -> None:
    own = planned.get(fqn)
    name = type(child).__name__
    if own is not None and own.kind != "replicated":
        planned[fqn] = _between_parts(own)
    elif is_token_wise(child):
        if own is not None:
            planned[fqn] = _on_parts(own, child, layers)
        elif isinstance(child, nn.Dropout) and child.p > 0:
            planned[fqn] = Boundary(fqn, "sequence", name, (), (_kept(child, layers),))
    else:
        # Routers, experts and whatever else is not known see whole sequences.
        own = own or Boundary(fqn, "replicated", name, ())
        inputs, output = layers.edge(_argument(child), inward=False), layers.edge("", inward=True)
        planned[fqn] = replace(own, inputs=(inputs,), output=output)


def _between_parts(region: Boundary) -> Boundary:
    """A region that gathers its input and leaves its output in parts: so is what is added to it."""
    inputs = tuple(replace(edge, src=PART) for edge in region.inputs)
    parameters = tuple(
        replace(plan, partial=True) if plan.name == f"{region.row}.bias" else plan for plan in region.parameters
    )
    edges = {(edge.src, edge.dst) for edge in region.inputs}
    if region.output is None or edges != {(REPLICATE, REPLICATE)} or region.output.src != PARTIAL:
        raise _refused(f"{region.fqn} is no region that gathers tokens and adds up what it gives: {region.note}")
    return replace(region, parameters=parameters, inputs=inputs, output=replace(region.output, dst=PART))


def _on_parts(own: Boundary, module: nn.Module, layers: _Layers, output: Edge | None = None) -> Boundary:
    parameters = tuple(replace(plan, partial=True) for plan in own.parameters)
    return Boundary(own.fqn, "sequence", own.module_type, parameters, (_kept(module, layers),), output)


def _kept(module: nn.Module, layers: _Layers) -> Edge:
    return Edge(_argument(module), PART, PART, layers.features, layers.itemsize)


def is_token_wise(module: nn.Module) -> bool:
    """Whether a module treats each token alone: a norm, a dropout, an activation."""
    return not list(module.children()) and all(one.ndim <= 1 for one in module.parameters())


def _argument(module: nn.Module) -> str:
    """What a module calls the hidden states: what its forward takes first."""
    return next(iter(inspect.signature(module.forward).parameters))


def _layers(model: PreTrainedModel) -> _Layers:
    if model.config.get_text_config() is not model.config:
        raise _refused(f"{type(model).__name__} puts more than text into its sequences")
    stacks = list(dict.fromkeys(fqn.rpartition(".")[0] for fqn, _ in blocks(model)))
    if len(stacks) != 1:
        raise _refused(f"{type(model).__name__} has {len(stacks) or 'no'} stacks of layers")
    path, _, name = stacks[0].rpartition(".")
    stack = model.get_submodule(stacks[0])
    layers = {f"{stacks[0]}.{index}": layer for index, layer in stack.named_children()}
    last, last_module = list(layers.items())[-1]
    children = list(model.get_submodule(path).named_children())
    behind = children[[child for child, _ in children].index(name) + 1 :]
    norms = [(f"{path}.{child}".lstrip("."), one) for child, one in behind if is_token_wise(one) and _learns(one)]
    if len(norms) == 1:
        ((last, last_module),) = norms
    weight = next(model.parameters())
    return _Layers(layers, last, last_module, model.config.get_text_config().hidden_size, weight.itemsize)


def _learns(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _refuse_own(fqn: str, layer: nn.Module) -> None:
    own = [name for name, _ in layer.named_parameters(recurse=False)]
    if own:
        raise _refused(f"{fqn}: {type(layer).__name__} computes with its own {own[0]!r}")
    if isinstance(layer, Drops) and layer.dropout > 0:
        raise _refused(f"{fqn}: {type(layer).__name__} drops in its own forward, where all ranks draw alike")


def _refused(message: str) -> InputError:
    return InputError(Problem(message, path=_PATH, hint="remove 'sequence_parallel'"))
