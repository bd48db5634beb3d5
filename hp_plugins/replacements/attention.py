"""The attention that most decoders of transformers share, and the check that a module is of that kind.

With `S` positions of `H` heads and `K` key heads of size `D`: q, k and v are projected to (batch, S, H or K, D), q and
k normalised per head where the module has norms for that, rotated by the family's own `apply_rotary_pos_emb`, joined
with the cache, attended causally, and projected back by `o_proj`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hp_core import ArgumentError
from hp_plugins.replacements.probe import Facts, Settings, Shape, differs, failure, on_cpu, random
from hp_plugins.replacements.takeover import Behaviour, arguments, copied, take_over

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS = ("q_norm", "k_norm")
_PLACE = frozenset({"layer_idx"})
_STARTS = ("hidden_states", "position_embeddings", "attention_mask")
_ENDS = (("cache", "**kwargs"), ("past_key_values", "**kwargs"))
_SPY = "_hyperparallel_probe"
_HINT = "narrow match to attention modules with q_proj, k_proj, v_proj and o_proj"

Tensor = torch.Tensor
# Names and values of more arguments to the attention function.
Handed = tuple[tuple[str, Any], ...]


class StandardAttention(Behaviour):
    """Attention in three parts, of which a replacement changes one: `project`, `rotate` and `attend`."""

    rotate: Callable[..., tuple[Tensor, Tensor]]
    eager: Callable[..., tuple[Tensor, Tensor | None]]
    handed: Handed
    config: Any
    layer_idx: int
    is_causal: bool
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    q_norm: nn.Module
    k_norm: nn.Module
    head_dim: int
    num_key_value_groups: int
    scaling: float
    attention_dropout: float

    def project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Project (batch, S, size) to q, k and v, each (batch, S, heads * D)."""
        return self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend by the function that the model's configuration names: (batch, heads, S, D) to (batch, S, heads, D)."""
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, self.eager)
        dropout = self.attention_dropout if self.training else 0.0
        # What the family hands over beside these, such as a sliding window, by its name here or in the config.
        more = {name: getattr(self if name in vars(self) else self.config, name, value) for name, value in self.handed}
        result: tuple[Tensor, Tensor | None] = attention(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **more, **kwargs
        )
        return result

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        *cache: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend over (batch, S, size).

        Args:
            hidden_states: the layer's normalised input.
            position_embeddings: cosines and sines of the rotary embedding, each (batch or 1, S, D).
            attention_mask: None for plain causal attention, else (batch, 1, S, keys): True where a key is seen, or
                numbers to add.
            cache: keys and values of earlier positions, also by its name, `cache` or `past_key_values`.
            kwargs: passed on to the attention function.
        """
        assert position_embeddings is not None
        named = [kwargs.pop(name, None) for name in ("cache", "past_key_values")]
        past = next((one for one in (*cache, *named) if one is not None), None)
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (flat.view(shape) for flat in self.project(hidden_states))
        if self._modules.get("q_norm") is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        query, key = self.rotate(query, key, *position_embeddings)
        if past is not None:
            key, value = past.update(key, value, self.layer_idx)
        output, weights = self.attend(query, key, value, attention_mask, **kwargs)
        projected: Tensor = self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))
        return projected, weights


Attention = TypeVar("Attention", bound=StandardAttention)


def standard_attention(
    module: nn.Module, behaviour: type[Attention], tried: type[StandardAttention] = StandardAttention
) -> Attention:
    """Return a module like `module` with the attention of `behaviour`.

    Args:
        module: what a recipe's pattern hit.
        behaviour: the code of the replacement.
        tried: the code to compare the original's with: `behaviour`, unless it needs other parameters.

    Raises:
        ArgumentError: the module computes something else than `tried`; the message says what differs.
    """
    handed = _handed_or_reason(module, tried)
    if isinstance(handed, str):
        raise ArgumentError("", f"{type(module).__name__} {handed}", _HINT)
    attention = take_over(module, behaviour)
    _bind(attention, type(module), handed)
    return attention


def with_norms(module: nn.Module, replace_norm: Callable[[str, nn.Module], nn.Module]) -> nn.Module:
    """Return an attention module like `module` whose norms per head are those that `replace_norm(name, norm)` gives."""
    changed = copied(module)
    for name in NORMS:
        norm = module._modules.get(name)
        if norm is not None:
            changed.add_module(name, replace_norm(name, norm))
    return changed


def _bind(attention: StandardAttention, original: type[nn.Module], handed: Handed) -> None:
    family = _family(original)
    # Past nn.Module, which would make a child of a kernel that happens to be a module.
    rotate, eager = family["apply_rotary_pos_emb"], family.get("eager_attention_forward")
    vars(attention).update(rotate=rotate, eager=eager, handed=handed)


def _family(original: type[nn.Module]) -> dict[str, Any]:
    """The names of the family's own modelling code."""
    names: dict[str, Any] = inspect.unwrap(original.forward).__globals__
    return names


def _handed_or_reason(module: nn.Module, tried: type[StandardAttention]) -> Handed | str:
    """What a module hands to the attention function, or why it is not of this kind."""
    children = {name: child for name, child in module._modules.items() if child is not None}
    wanted = {*PROJECTIONS, *NORMS} if NORMS[0] in children else set(PROJECTIONS)
    taken = arguments(module)
    if children.keys() != wanted:
        lacks, more = sorted(wanted - children.keys()), sorted(children.keys() - wanted)
        return (
            "is no standard attention:"
            + (f" lacks {', '.join(lacks)};" if lacks else "")
            + (f" has {', '.join(more)}" if more else "")
        )
    if module._parameters or module._buffers:
        return f"holds {', '.join([*module._parameters, *module._buffers])} beside its projections"
    if any(type(children[name]) is not nn.Linear for name in PROJECTIONS):
        return "has projections that are no torch.nn.Linear"
    if taken[:3] != _STARTS or taken[3:] not in _ENDS:
        return f"has another forward: ({', '.join(taken)})"
    if "apply_rotary_pos_emb" not in _family(type(module)):
        return "does not rotate by an apply_rotary_pos_emb of its family"
    facts = Facts.of(module, without=_PLACE)
    if "config" not in vars(module):
        return "has no config to tell the attention function by"
    settings = ("head_dim", "num_key_value_groups", "scaling", "attention_dropout")
    missing = [name for name in settings if not isinstance(facts.attribute(name), int | float)]
    if missing:
        return f"has no {', '.join(missing)}"
    config = vars(module)["config"]
    behaviour: Any = tried
    return _tried(facts, Settings.of(config), behaviour, config._attn_implementation)


@lru_cache(maxsize=256)
def _tried(facts: Facts, settings: Settings, behaviour: Any, implementation: str) -> Handed | str:
    """What the original hands to the attention function, or how `behaviour` differs from the original's code."""
    with on_cpu():
        original, inputs = _probe(facts)
        try:
            original.config = settings.build(_attn_implementation=_SPY)
            handed = _handed(original, inputs, facts.kind)
            if isinstance(handed, str):
                return handed
            if handed is None and implementation not in ("sdpa", "eager"):
                return f"does not call the attention function {implementation}"
            eager = implementation == "eager"
            for training in (False, True):
                original.train(training)
                dropout = 0.0 if training else facts.attribute("attention_dropout")
                # Dropout of attention weights is drawn in another order by another function.
                original.attention_dropout = dropout
                original.config = settings.build(
                    _attn_implementation="eager" if eager else "sdpa", attention_dropout=dropout
                )
                ours = take_over(original, behaviour)
                _bind(ours, facts.kind, handed or ())
                if _differ(ours, original, inputs, eager):
                    what = "adds something in training, such as dropout, that would be lost"
                    return (
                        what
                        if training
                        else "computes something else than softmax(q k * scaling) v" + " between its projections"
                    )
        except Exception as error:
            return failure(error)
    return handed or ()


def _probe(facts: Facts) -> tuple[Any, dict[str, Any]]:
    """A small attention, and its input. It has no place among the layers: code that differs by it can't be tried."""
    size, length = 8, 4
    projections = dict(facts.children)
    shapes: dict[str, Shape] = {
        f"{name}.weight": (projections[name].shape("weight")[0], size) for name in PROJECTIONS[:3]
    }
    shapes["o_proj.weight"] = (size, projections["o_proj"].shape("weight")[1])
    shapes["o_proj.bias"] = (size,)
    angles = random(1, length, int(facts.attribute("head_dim")), seed=1)
    inputs = {"hidden_states": random(1, length, size, seed=2), "position_embeddings": (angles.cos(), angles.sin())}
    return facts.build(shapes), inputs


def _differ(ours: nn.Module, original: nn.Module, inputs: dict[str, Any], eager: bool) -> bool:
    length = inputs["hidden_states"].shape[1]
    previous = torch.eye(length).bool() | torch.eye(length).bool().roll(1, 0)
    # Plain eager code is causal only by its mask, of numbers to add.
    masks = [torch.zeros(length, length).masked_fill(~previous, -1e9)] if eager else [None, previous]
    for mask in (one if one is None else one[None, None] for one in masks):
        torch.default_generator.manual_seed(0)
        theirs, *_ = original(**inputs, attention_mask=mask)
        torch.default_generator.manual_seed(0)
        found, *_ = ours(**inputs, attention_mask=mask)
        if differs(found, theirs):
            return True
    return False


def _handed(original: Any, inputs: dict[str, Any], kind: type[nn.Module]) -> Handed | str | None:
    """Listen to what is handed to the attention function beside dropout and scaling; None if it isn't called."""
    heard: list[dict[str, Any]] = []

    def spy(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **named: Any) -> tuple[Tensor, None]:
        del module, key, value, mask
        heard.append(named)
        return query.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS[_SPY] = spy
    try:
        for training in (False, True):
            torch.default_generator.manual_seed(0)
            original.train(training)(**inputs, attention_mask=None)
        if not heard:
            return None
        handed = tuple([(name, value) for name, value in heard[0].items() if name not in ("dropout", "scaling")])
        ours = take_over(original, StandardAttention)
        for training in (False, True):
            _bind(ours, kind, handed)
            ours.train(training)(**inputs, attention_mask=None)
    finally:
        del ALL_ATTENTION_FUNCTIONS[_SPY]
    if heard[:2] != heard[2:]:
        names = sorted(
            {name for one in heard for name in one if any(one.get(name) != two.get(name) for two in heard[:2])}
        )
        return f"hands its attention function {', '.join(names)} in its own way"
    return handed
