"""What the ranks of an axis send each other beside the edges of tensor parallelism, and how much of it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from torch import nn
from transformers import PreTrainedModel

from hp_core.config.models import AcceleratorConfig, FsdpConfig, MixedPrecisionConfig
from hp_core.model.units import blocks
from hp_core.parallel.plan.edge import Direction
from hp_core.parallel.plan.layout import ModelLayout
from hp_core.parallel.plan.roles import GroupedAttention, LatentAttention

Unit = Literal["token", "pass"]
_ITEMSIZE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Settings:
    """The sections of a recipe that say how the ranks of its sizes work together."""

    accelerator: AcceleratorConfig = field(default_factory=AcceleratorConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    precision: MixedPrecisionConfig = field(default_factory=MixedPrecisionConfig)


@dataclass(frozen=True)
class Exchange:
    """A collective of one module along an axis.

    Attributes:
        axis: `cp`, `ep`, `fsdp`, `efsdp` or `dp_replicate`.
        fqn: the module's name, empty for what is left of the model.
        collective: what the ranks do.
        direction: the pass in which they do it.
        size_bytes: the whole of what is sent, counted once however many ranks get it.
        per: for each token of the micro-batch that a rank has, or once in each pass.
    """

    axis: str
    fqn: str
    collective: str
    direction: Direction
    size_bytes: int
    per: Unit


@runtime_checkable
class RoutesTokens(Protocol):
    """A configuration that says how many experts a token is sent to."""

    num_experts_per_tok: int


def exchange_lines(exchanges: Sequence[Exchange]) -> Iterator[str]:
    """The exchanges in words, those of layers that are alike together."""
    groups: dict[tuple[str, str, str, str, int, Unit], list[str]] = {}
    for one in exchanges:
        key = (one.axis, re.sub(r"\b\d+\b", "*", one.fqn), one.collective, one.direction, one.size_bytes, one.per)
        groups.setdefault(key, []).append(one.fqn)
    for (axis, general, collective, direction, size_bytes, per), fqns in groups.items():
        where = fqns[0] or "(the rest)" if len(fqns) == 1 else f"{general}, {len(fqns)} times"
        yield f"{axis}: {where}: {collective} in {direction}, {size_bytes:,} bytes a {per}"


def exchanges_of(
    model: PreTrainedModel, layout: ModelLayout, experts: Collection[str], settings: Settings
) -> Iterator[Exchange]:
    """What context, expert and FSDP ranks send, in the order of the model."""
    sizes, config = layout.sizes, model.config.get_text_config()
    itemsize = _ITEMSIZE.get(settings.precision.param_dtype or "", next(model.parameters()).itemsize)
    if sizes.cp > 1:
        yield from _of_attention(model, config, settings.accelerator.cp_method, sizes.tp, itemsize)
    if isinstance(config, RoutesTokens):
        size = config.num_experts_per_tok * int(config.hidden_size) * itemsize
        for fqn in experts:
            directions: tuple[Direction, ...] = ("forward", "backward")
            for direction in directions:
                yield Exchange("ep", fqn, "all_to_all there and back", direction, 2 * size, "token")
    yield from _of_units(model, layout, frozenset(experts), settings)


def _of_attention(model: nn.Module, config: Any, method: str, tp_size: int, itemsize: int) -> Iterator[Exchange]:
    """Keys and values, of a tensor rank's own heads; with Ulysses queries and outputs as well."""
    heads = int(config.num_attention_heads)
    for fqn, module in model.named_modules():
        if isinstance(module, LatentAttention):
            key = int(config.qk_nope_head_dim) + int(config.qk_rope_head_dim)
            value = int(config.v_head_dim)
            kv_heads = heads
        elif isinstance(module, GroupedAttention):
            key = value = int(module.head_dim)
            kv_heads = heads // int(module.num_key_value_groups)
        else:
            continue
        keys_and_values = max(1, kv_heads // tp_size) * (key + value) * itemsize
        all_heads = heads // tp_size * (key + value) * itemsize
        if method == "all_gather":
            yield Exchange("cp", fqn, "all_gather", "forward", keys_and_values, "token")
            yield Exchange("cp", fqn, "reduce_scatter", "backward", keys_and_values, "token")
        elif method == "ring":
            yield Exchange("cp", fqn, "ring", "forward", keys_and_values, "token")
            yield Exchange("cp", fqn, "ring, with gradients", "backward", 2 * keys_and_values, "token")
        else:
            yield Exchange("cp", fqn, "all_to_all there and back", "forward", keys_and_values + all_heads, "token")
            yield Exchange("cp", fqn, "all_to_all there and back", "backward", keys_and_values + all_heads, "token")


def _of_units(model: nn.Module, layout: ModelLayout, experts: frozenset[str], settings: Settings) -> Iterator[Exchange]:
    """FSDP's: parameters are gathered for each pass, gradients are summed and scattered in backward."""
    owners = [fqn for fqn, _ in blocks(model)]
    elements: dict[tuple[str, str], int] = {}
    at_first = layout.first_coordinates
    for one in layout.parameters:
        holder = one.fqn.rpartition(".")[0]
        is_expert = holder in experts
        unit = holder if is_expert else next((fqn for fqn in owners if one.fqn.startswith(f"{fqn}.")), "")
        axis = "efsdp" if is_expert else "fsdp"
        # Without FSDP's own cut: what all its ranks hold together.
        elements[axis, unit] = elements.get((axis, unit), 0) + one.numel_before(axis, at_first)
    kept, reduced = settings.precision.param_dtype, settings.precision.reduce_dtype
    master = next(model.parameters()).itemsize
    gathered = _ITEMSIZE.get(kept or "", master)
    summed = _ITEMSIZE.get(reduced or ("float32" if kept else ""), master)
    reshards = settings.fsdp.reshard_after_forward
    for (axis, unit), number in elements.items():
        if layout.axes[axis] > 1:
            yield Exchange(axis, unit, "all_gather", "forward", number * gathered, "pass")
            if unit and (layout.sizes.pp == 1 if reshards is None else reshards):
                yield Exchange(axis, unit, "all_gather", "backward", number * gathered, "pass")
            yield Exchange(axis, unit, "reduce_scatter", "backward", number * summed, "pass")
        if layout.sizes.dp_replicate > 1:
            own = -(-number // layout.axes[axis])
            yield Exchange("dp_replicate", unit, "all_reduce", "backward", own * summed, "pass")
