"""The stages of a transformers model that a rank holds, each the model's own forward with other layers passed by."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from transformers import PreTrainedModel

from hp_core.errors import InputError, Problem
from hp_core.parallel.pipeline.split import Costs, balanced, cost_of, written

PATH = "accelerator.pp_size"
_HINT = "remove 'pp_size'"


class Elsewhere(nn.Module):
    """In the place of a module that another stage holds: it hands on what it is given."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`hidden_states`, untouched."""
        return hidden_states


@dataclass(frozen=True, eq=False)
class Stage:
    """Some layers of a model, with its embedding in the first and its norm and head in the last.

    Attributes:
        index: its place among `num_stages`.
        num_stages: those of all ranks.
        layers: the numbers of its layers.
        view: the model with its own modules alone; it shares them with the rank's model.
        forward: the model's own forward, of this view.
    """

    index: int
    num_stages: int
    layers: range
    view: PreTrainedModel
    forward: Callable[..., Any]

    @property
    def is_first(self) -> bool:
        """Whether it is given tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it gives logits."""
        return self.index == self.num_stages - 1


@runtime_checkable
class PlansStages(Protocol):
    """A configuration of transformers with its plan for pipelines: what each child takes and gives, in order."""

    base_model_pp_plan: Mapping[str, tuple[Sequence[str], Sequence[str]]]


@dataclass(frozen=True)
class Anatomy:
    """Where a causal language model has its parts: children of its base model, and its head."""

    base: str
    embedding: str
    layers: str
    after: tuple[str, ...]
    head: str
    is_tied: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> Anatomy:
        """Read transformers' own plan of the model.

        Raises:
            InputError: it has none, or one that leaves a part of the model out.
        """
        base, config = model.base_model, model.config
        plan = config.base_model_pp_plan if isinstance(config, PlansStages) else None
        if base is model or not plan:
            raise _refused(model, "transformers has no plan for its stages")
        embedding = [name for name, (_, gives) in plan.items() if "inputs_embeds" in gives]
        layers = [name for name in plan if isinstance(base.get_submodule(name), nn.ModuleList)]
        head = [name for name, one in model.named_children() if one is model.get_output_embeddings()]
        if len(embedding) != 1 or len(layers) != 1 or len(head) != 1:
            raise _refused(model, "its plan has not one embedding, one list of layers and one head")
        names = list(plan)
        after = tuple(names[names.index(layers[0]) + 1 :])
        known = {embedding[0], layers[0], *after}
        others = [name for name, one in base.named_children() if name not in known and _holds(one)]
        others += [name for name, one in model.named_children() if one is not base and name != head[0] and _holds(one)]
        if others:
            raise _refused(model, f"its plan says nothing of {others[0]}")
        is_tied = embedding_of(model).weight is model.get_output_embeddings().weight
        return cls(model.base_model_prefix, embedding[0], layers[0], after, head[0], is_tied)

    def stack(self, model: PreTrainedModel) -> nn.ModuleList:
        """The list of layers."""
        stack = model.get_submodule(f"{self.base}.{self.layers}")
        assert isinstance(stack, nn.ModuleList)
        return stack

    def costs(self, model: PreTrainedModel) -> Costs:
        """What a token costs in each part."""
        after = sum(cost_of(model.get_submodule(f"{self.base}.{name}"), model.config) for name in self.after)
        layers = tuple(cost_of(layer, model.config) for layer in self.stack(model))
        # A token is looked up, not multiplied.
        return Costs(
            embedding_of(model).embedding_dim, layers, after + cost_of(model.get_submodule(self.head), model.config)
        )


def embedding_of(model: PreTrainedModel) -> nn.Embedding:
    """What turns tokens into hidden states; a stage after the first has it where it is the head, too."""
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    return embedding


def split_layers(
    model: PreTrainedModel, anatomy: Anatomy, num_stages: int, layers: Sequence[int] | None
) -> list[range]:
    """The layers of each stage: those that the recipe says, or a split by cost.

    Raises:
        InputError: there are fewer layers than stages, or other layers than the recipe distributes.
    """
    num_layers = len(anatomy.stack(model))
    if num_layers < num_stages:
        message = f"{num_stages} stages need as many layers, and the model has {num_layers}"
        raise InputError(Problem(message, path=PATH, hint=f"let pp_size x pp_stages_per_rank be at most {num_layers}"))
    if layers is None:
        return balanced(anatomy.costs(model), num_stages)
    if sum(layers) != num_layers:
        message = f"{sum(layers)} layers are given to stages, and the model has {num_layers}"
        raise InputError(Problem(message, path="accelerator.pp_layers", hint=f"let them add up to {num_layers}"))
    return written(layers)


def keep_stages(model: PreTrainedModel, anatomy: Anatomy, split: Sequence[range], own: Sequence[int]) -> list[Stage]:
    """Leave `model` the modules of its `own` stages alone, in place, and return these stages."""
    kept = {index for number in own for index in split[number]}
    base, last = model.get_submodule(anatomy.base), len(split) - 1
    stack = anatomy.stack(model)
    for index in range(len(stack)):
        if index not in kept:
            stack[index] = Elsewhere()
    if last not in own:
        base._modules.update({name: Elsewhere() for name in anatomy.after})
        model._modules[anatomy.head] = Elsewhere()
    if 0 not in own and not (anatomy.is_tied and last in own):
        base._modules[anatomy.embedding] = Elsewhere()
    if last not in own:
        # Nothing here is tied to anything.
        model._tied_weights_keys = {}
    return [_stage(model, anatomy, split, number) for number in own]


def trunk_of(model: PreTrainedModel, anatomy: Anatomy) -> PreTrainedModel:
    """The model without any of its layers, norm and head: what it does between them."""
    return _view(model, anatomy, range(0), is_first=False, is_last=False)


def _stage(model: PreTrainedModel, anatomy: Anatomy, split: Sequence[range], number: int) -> Stage:
    is_last = number == len(split) - 1
    view = _view(model, anatomy, split[number], is_first=number == 0, is_last=is_last)
    return Stage(number, len(split), split[number], view, view.forward)


def _view(model: PreTrainedModel, anatomy: Anatomy, layers: range, *, is_first: bool, is_last: bool) -> PreTrainedModel:
    view: PreTrainedModel = _shallow(model)
    base = _shallow(model.get_submodule(anatomy.base))
    view._modules[anatomy.base] = base
    stack = enumerate(anatomy.stack(model))
    base._modules[anatomy.layers] = nn.ModuleList(one if index in layers else Elsewhere() for index, one in stack)
    if not is_first and not (anatomy.is_tied and is_last):
        base._modules[anatomy.embedding] = Elsewhere()
    if not is_last:
        base._modules.update({name: Elsewhere() for name in anatomy.after})
        view._modules[anatomy.head] = Elsewhere()
    return view


def _shallow(module: Any) -> Any:
    """A module of the same children, parameters and buffers, which may be exchanged without the other noticing."""
    copied = copy.copy(module)
    copied.__dict__.update({name: value.copy() for name, value in vars(module).items() if _is_registry(name, value)})
    return copied


def _is_registry(name: str, value: Any) -> bool:
    return isinstance(value, dict) and (name in ("_parameters", "_buffers", "_modules") or name.endswith("_hooks"))


def _holds(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def elsewhere(model: nn.Module) -> Iterator[str]:
    """The names of the modules that other stages hold."""
    yield from (fqn for fqn, module in model.named_modules() if isinstance(module, Elsewhere))


def _refused(model: nn.Module, why: str) -> InputError:
    return InputError(Problem(f"{type(model).__name__} can't be cut into stages: {why}", path=PATH, hint=_HINT))
