"""The floating-point operations that training asks of a model, counted from its modules.

What is counted are products of matrices, an addition and a multiplication for each pair of numbers, as is usual for MFU
(Chowdhery et al. 2022, PaLM, appendix B): 2 x in x out for a matrix that a token is multiplied with, once in the
forward pass and twice in the backward pass, for the gradients of its input and of its weights. Unlike there, attention
counts the pairs of tokens that see each other. Norms, activations, softmax, biases and looking up an embedding count
nothing, and neither does what activation checkpointing computes again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hp_core.parallel.agreement import gathered
from hp_core.parallel.expert.experts import holds_experts
from hp_core.parallel.images import sees_images
from hp_core.parallel.setup import DistributedSetup

# What families call the projection of what the heads found.
_OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense")
# What is there, and not called, where a copy is trained in its place (modules_to_save of peft).
_REPLACED = "original_module"
# What layers call the norm that everything in them comes after.
_INPUT_NORMS = frozenset({"input_layernorm", "ln_1"})
# What they call what is called one after the other: the first with the same input, and what takes their results.
_FIRST = frozenset({"self_attn", "q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj"})
_FIRST |= {"base_layer", "lora_A"}
_SECOND = frozenset({"mlp", "o_proj", "down_proj", "lora_B"})
_BESIDE = frozenset({"experts", "gate", "router", "shared_expert", "shared_experts", "shared_expert_gate"})
_KNOWN = _FIRST | _SECOND | _BESIDE


class UnknownFlopsError(Exception):
    """A model has a part of which it isn't known what it computes; the text names it."""


@dataclass(frozen=True)
class Flops:
    """Operations for each token, and for each pair of a token and one that it sees, itself or before it.

    `per_pair` goes by how many tokens one sees at most; None is all of its document.
    """

    per_token: int = 0
    per_pair: Mapping[int | None, int] = field(default_factory=dict)

    def __add__(self, other: Flops) -> Flops:
        windows = dict.fromkeys(chain(self.per_pair, other.per_pair))
        per_pair = {one: self.per_pair.get(one, 0) + other.per_pair.get(one, 0) for one in windows}
        return Flops(self.per_token + other.per_token, per_pair)

    def of_tokens(self, positions: torch.Tensor) -> float:
        """The operations for tokens at these positions in their documents, counted from 0; any shape."""
        seen = positions + 1
        pairs = sum(
            number * int((seen if window is None else seen.clamp(max=window)).sum())
            for window, number in self.per_pair.items()
        )
        return float(self.per_token * positions.numel() + pairs)


@runtime_checkable
class _Attends(Protocol):
    """A module of transformers that computes attention."""

    is_causal: bool


@runtime_checkable
class _HasTwoHeadSizes(Protocol):
    """Attention whose queries and keys have other sizes than its values (MLA)."""

    qk_head_dim: int
    v_head_dim: int


@runtime_checkable
class _ChoosesExperts(Protocol):
    """A router, or the block that it is in."""

    top_k: int


@dataclass(frozen=True)
class _Product:
    """A token's products with the matrices of a module in the forward pass, and of these those that are trained."""

    per_token: int
    of_weights: int

    @classmethod
    def of(cls, matrices: Sequence[nn.Parameter], chosen: int = 1, out_of: int = 1) -> _Product:
        """Of matrices that are all used, or so many as are chosen out of a number of them in each parameter."""
        operations = [(2 * one.numel() // out_of * chosen, one.requires_grad) for one in matrices]
        return cls(sum(number for number, _ in operations), sum(number for number, trains in operations if trains))


@dataclass(frozen=True)
class _Part:
    """A layer, or what is before or behind all of them.

    `backward` is for a part to whose input gradients go back; `first` for one that nothing trained is before, or why
    it isn't known.
    """

    forward: Flops = Flops()
    backward: Flops = Flops()
    first: Flops | str = Flops()
    is_trained: bool = False


def training_flops(model: nn.Module, setup: DistributedSetup) -> Flops:
    """The forward and backward pass of a finished model; the same on any layout of ranks. Every rank calls it.

    Frozen matrices have no gradients, and no gradient goes back behind the first part that is trained.

    Raises:
        UnknownFlopsError: there is a part of which it isn't known how often a token is multiplied with it.
    """
    own: list[_Part] | str
    try:
        own = _parts(model)
    except UnknownFlopsError as error:
        own = str(error)
    by_rank = gathered(own, setup) if setup.sizes.pp > 1 else [own]
    for one in by_rank:
        if isinstance(one, str):
            raise UnknownFlopsError(one)
    total, gradients_go_back = Flops(), False
    for same in zip(*by_rank, strict=True):
        # Ranks that have a part all count the same, and the others of a pipeline nothing.
        part = max(same, key=lambda one: one.forward.per_token)
        backward = part.backward if gradients_go_back else part.first
        if isinstance(backward, str):
            raise UnknownFlopsError(backward)
        total += part.forward + backward
        gradients_go_back = gradients_go_back or any(one.is_trained for one in same)
    return total


def _parts(model: nn.Module) -> list[_Part]:
    """The embeddings, each layer, and the head; parts that other stages of a pipeline hold are empty."""
    if not isinstance(model, PreTrainedModel):
        raise UnknownFlopsError(f"{type(model).__name__} is no model of transformers")
    if sees_images(model):
        raise UnknownFlopsError(f"{type(model).__name__} takes images, whose patches are not counted")
    head, layers = model.get_output_embeddings(), list(_layers(model))
    counted = [layer for _, layer in layers] + ([] if head is None else [head])
    inside = {id(module) for one in counted for module in one.modules()}
    embeds = behind = False
    for fqn, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        is_trained = any(one.requires_grad for one in own.values())
        if isinstance(module, nn.Embedding):
            embeds = embeds or is_trained
        elif id(module) not in inside:
            behind = behind or is_trained
            if matrices := [name for name, one in own.items() if one.ndim > 1]:
                raise _unknown(f"{fqn}.{matrices[0]}", module)
    sizes = model.config.get_text_config().to_dict()
    parts = [_layer(layer, fqn, _window(sizes, index)) for index, (fqn, layer) in enumerate(layers)]
    return [_Part(is_trained=embeds), *parts, _Part(is_trained=behind), *([] if head is None else [_head(head)])]


def _layers(module: nn.Module, fqn: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost members of lists, also those that another stage holds."""
    for name, child in module.named_children():
        inner = f"{fqn}.{name}" if fqn else name
        if isinstance(module, nn.ModuleList):
            yield inner, child
        else:
            yield from _layers(child, inner)


def _window(sizes: Mapping[str, Any], index: int) -> int | None:
    """How many tokens one sees at most in a layer, itself among them, by the model's configuration."""
    kinds, window = sizes.get("layer_types"), sizes.get("sliding_window")
    if kinds and index >= len(kinds):
        raise UnknownFlopsError(f"layer {index} is none of the {len(kinds)} that the configuration has a kind of")
    kind = kinds[index] if kinds else "full_attention" if window is None else "sliding_attention"
    if kind == "full_attention":
        return None
    if kind != "sliding_attention" or window is None:
        raise UnknownFlopsError(f"layer {index} has {kind!r}" + " without a window" * (kind == "sliding_attention"))
    return int(window)


def _head(head: nn.Module) -> _Part:
    products = dict(_products(head, "the head"))
    forward = Flops(sum(one.per_token for one in products.values()))
    gradients = Flops(sum(one.of_weights for one in products.values()))
    return _Part(forward, forward + gradients, Flops(_first_per_token(products, _trained(head))))


def _layer(layer: nn.Module, fqn: str, window: int | None) -> _Part:
    if not any(True for _ in layer.parameters()):
        return _Part()
    attention = [name for name, one in layer.named_modules() if isinstance(one, _Attends)]
    if len(attention) != 1:
        raise UnknownFlopsError(f"{fqn} ({type(layer).__name__}) has {len(attention) or 'no'} modules of attention")
    products = dict(_products(layer, fqn))
    per_pair = _per_pair(layer.get_submodule(attention[0]), f"{fqn}.{attention[0]}")
    forward = Flops(sum(one.per_token for one in products.values()), {window: per_pair})
    backward = forward + Flops(sum(one.of_weights for one in products.values()), {window: per_pair})
    trained = _trained(layer)
    if not trained:
        first: Flops | str = Flops()
    elif _INPUT_NORMS.isdisjoint(trained):
        first = _first(layer, fqn, products, trained, {window: per_pair // 2})
    else:
        first = backward
    return _Part(forward, backward, first, bool(trained))


def _first(
    layer: nn.Module,
    fqn: str,
    products: Mapping[str, _Product],
    trained: Collection[str],
    per_half: Mapping[int | None, int],
) -> Flops | str:
    """The backward pass of a layer to whose input no gradient goes back, if its products follow each other as known.

    `per_half` are the operations of a pair for its score, which are as many as for its share of the values.
    """
    unknown = [name for name in trained if name not in products]
    unknown += [name for name in products if not _KNOWN.issuperset(name.split(".")[:3])]
    # Of two products in one module, the second needs gradients for what the first gives.
    unknown += [name for name in trained if name.endswith("experts") and not _is_reached(name, trained)]
    if unknown or "post_attention_layernorm" not in dict(layer.named_children()):
        where = ".".join([fqn, *unknown[:1]])
        return f"{where} is trained, or comes after what is, and it isn't known which gradients that takes"
    parts = {part for name in trained for part in name.split(".")[:2]}
    query, key, value = (not parts.isdisjoint((name, "qkv_proj")) for name in ("q_proj", "k_proj", "v_proj"))
    factor = query + key + value + (query or key)
    return Flops(_first_per_token(products, trained), {window: half * factor for window, half in per_half.items()})


def _first_per_token(products: Mapping[str, _Product], trained: Collection[str]) -> int:
    """The gradients that matrices have, and those that have to pass by others on their way back to what is trained."""
    return sum(one.of_weights + one.per_token * _is_reached(name, trained) for name, one in products.items())


def _trained(part: nn.Module) -> list[str]:
    """The modules that have a trained parameter of their own."""
    return [name for name, one in part.named_modules() if any(p.requires_grad for p in one.parameters(recurse=False))]


def _is_reached(name: str, others: Collection[str]) -> bool:
    """Whether what one of the others gives goes into the module; all by their names in a layer."""
    for other in others:
        pairs = zip(other.split("."), name.split("."), strict=False)
        its, own = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
        if its in _FIRST and own in _SECOND:
            return True
    return False


def _products(part: nn.Module, fqn: str) -> Iterator[tuple[str, _Product]]:
    """What each module of a layer, or of the head, multiplies a token with, by its name in there."""
    experts = [one for one in part.modules() if holds_experts(one)]
    chosen = {one.top_k for one in part.modules() if isinstance(one, _ChoosesExperts)}
    if experts and len(chosen) != 1:
        raise UnknownFlopsError(f"{fqn} ({type(part).__name__}) does not say how many experts a token is sent to")
    numbers = {len(parameter) for one in experts for parameter in one.parameters(recurse=False)}
    # A module in two places is called twice.
    for name, module in part.named_modules(remove_duplicate=False):
        if isinstance(module, nn.ModuleList) and any(True for _ in module.parameters()):
            raise UnknownFlopsError(f"{fqn}.{name} is a list of modules, each of which some tokens may pass by")
        own = {key: one for key, one in module.named_parameters(recurse=False) if one.ndim > 1}
        if not own or _REPLACED in name.split("."):
            continue
        if isinstance(module, (nn.Linear, Conv1D)) or (own.keys() == {"weight"} and len(own["weight"]) in numbers):
            # What has a row for each expert, beside experts, is a router.
            yield name, _Product.of([own.pop("weight")])
        elif holds_experts(module) and not name.endswith("base_layer"):
            # A vector for each expert is a bias.
            yield name, _Product.of([one for one in own.values() if one.ndim > 2], max(chosen), max(numbers))
            own = {key: one for key, one in own.items() if len(one) not in numbers}
        if own:
            raise _unknown(f"{fqn}.{name}.{next(iter(own))}", module)


def _per_pair(attention: nn.Module, fqn: str) -> int:
    """What a pair takes in the forward pass: its scores, and its shares of the values, in all heads."""
    where = f"{fqn} ({type(attention).__name__})"
    if isinstance(attention, _Attends) and not attention.is_causal:
        raise UnknownFlopsError(f"{where} attends to what comes after a token")
    children = dict(attention.named_children())
    outputs = [children[one] for one in _OUTPUTS if one in children]
    # Adapters come after what they adapt.
    found = [one for output in outputs for one in output.modules() if isinstance(one, (nn.Linear, Conv1D))][:1]
    if len(outputs) != 1 or not found:
        raise UnknownFlopsError(f"{where} has no projection called {', '.join(_OUTPUTS)}")
    features = int(found[0].weight.shape[0 if isinstance(found[0], Conv1D) else 1])
    if isinstance(attention, _HasTwoHeadSizes):
        return 2 * features // attention.v_head_dim * (attention.qk_head_dim + attention.v_head_dim)
    return 4 * features


def _unknown(name: str, module: nn.Module) -> UnknownFlopsError:
    return UnknownFlopsError(f"it isn't known how often a token is multiplied with {name} ({type(module).__name__})")
