"""The sharding plan of a model: attentions and MLPs cut by heads and features, embedding and head by vocabulary.

Shoeybi et al. 2019 (Megatron-LM): projections into a region are cut by columns, the one out of it by rows. Inside a
region each rank has its own heads or features, so a parameter that all of them use whole has a partial gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel

from hp_core.errors import InputError, Problem
from hp_core.model.around import holder_of
from hp_core.parallel.plan.boundary import Boundary, ParameterPlan, ShardingPlan
from hp_core.parallel.plan.contract import Contract
from hp_core.parallel.plan.edge import PARTIAL, REPLICATE, Edge
from hp_core.parallel.plan.roles import (
    KV_PROJECTIONS,
    LATENT_PARTS,
    GroupedAttention,
    LatentAttention,
    Roles,
    SparseMLP,
    is_plain,
    roles_of,
)
from hp_core.parallel.plan.sequence import on_sequences
from hp_core.parallel.plan.shapes import PATH, SharedSizes
from hp_core.parallel.plan.vocabulary import with_vocabulary
from hp_core.parallel.plan.written import with_contracts


@dataclass(frozen=True)
class _Region:
    """A module that can be shared, before it is known whether its sizes fit; or why it can't be."""

    fqn: str
    module: nn.Module
    roles: Roles | None = None
    heads: tuple[int, int] | None = None
    note: str = ""

    @property
    def sizes(self) -> SharedSizes:
        if self.roles is None or self.note:
            return SharedSizes()
        if self.heads is not None:
            return SharedSizes(heads=frozenset({self.heads}))
        return SharedSizes(widths=frozenset({self.roles.row_linear.in_features}))


@dataclass
class _Seen:
    """The parameters that a boundary has already: tied weights belong to the first."""

    parameters: set[nn.Parameter] = field(default_factory=set)

    def first(self, module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in module.named_parameters(recurse=recurse):
            if parameter not in self.parameters:
                self.parameters.add(parameter)
                yield name, parameter


def derive_plan(
    model: PreTrainedModel,
    tp_size: int,
    contracts: Sequence[Contract] = (),
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    first_layers: Sequence[int] = (0,),
) -> ShardingPlan:
    """The plan of `model`, on whatever device, for `tp_size` ranks; nothing of the model is changed.

    Args:
        model: on meta, or anywhere.
        tp_size: how many ranks share it.
        contracts: what the recipe says of some of its modules, in the place of what is derived.
        sequence_parallel: cut the sequences between regions, too.
        loss_parallel: leave the logits in parts of the vocabulary.
        first_layers: those of the stages of a pipeline.

    Raises:
        InputError: heads or widths can't be shared by so many ranks (all of them, with the numbers that would
            work), the model has nothing to share or not what the two options need, or a contract doesn't fit. See
            `with_contracts`.
    """
    boundaries = _boundaries(model, tp_size, contracts)
    boundaries = with_vocabulary(model, boundaries, tp_size, contracts, loss_parallel=loss_parallel)
    boundaries = with_contracts(model, boundaries, contracts, tp_size)
    if sequence_parallel:
        boundaries = on_sequences(model, boundaries, first_layers)
    plan = ShardingPlan(tp_size, tuple(boundaries))
    if not plan.shared:
        message = "every module is kept whole, so that ranks have nothing to share"
        raise InputError(Problem(message, path=PATH, hint="remove 'tp_size', or leave some to be cut"))
    return plan


def _boundaries(model: PreTrainedModel, tp_size: int, contracts: Sequence[Contract]) -> list[Boundary]:
    whole = {one.fqn: f"kept whole by {one.path}" for one in contracts if one.keeps_whole}
    regions = list(_regions(model, whole))
    _refuse_misfits(model, regions, tp_size, may_be_none=bool(contracts))
    by_name = {one.fqn: one for one in regions}
    boundaries: list[Boundary] = []
    inside: set[nn.Module] = set()
    seen = _Seen()
    for fqn, module in model.named_modules():
        if module in inside:
            continue
        region = by_name.get(fqn)
        if region is not None and region.roles is not None and not region.note:
            inside.update(module.modules())
            boundaries.append(_shared(region, region.roles, tp_size, seen))
            continue
        note = region.note if region is not None else ""
        parameters = tuple(ParameterPlan(name, tuple(one.shape)) for name, one in seen.first(module, recurse=False))
        if parameters or note:
            boundaries.append(Boundary(fqn, "replicated", type(module).__name__, parameters, note=note))
    return boundaries


def _regions(model: PreTrainedModel, whole: Mapping[str, str]) -> Iterator[_Region]:
    tp_plan = model.tp_plan
    for fqn, module in model.named_modules():
        if fqn in whole:
            yield _Region(fqn, module, note=whole[fqn])
            continue
        roles = roles_of(fqn, module, tp_plan)
        is_attention = isinstance(module, (GroupedAttention, LatentAttention))
        if roles is not None:
            yield _region(fqn, module, roles)
        elif is_attention:
            yield _Region(fqn, module, note="its projections are fused, or not linear")


def _region(fqn: str, module: nn.Module, roles: Roles) -> _Region:
    projections = {**roles.columns, roles.row: roles.row_linear}
    if own := [name for name, linear in projections.items() if not is_plain(linear, nn.Linear)]:
        alone = holder_of(projections[own[0]]) is not projections[own[0]]
        why = "is computed again, or swapped, by itself" if alone else "is no plain torch.nn.Linear"
        return _Region(fqn, module, roles, note=f"its {own[0]} {why}")
    others = {name: one for name, one in module.named_parameters() if name.partition(".")[0] not in _cut(roles)}
    if isinstance(module, LatentAttention):
        unknown = sorted(name for name in others if name.partition(".")[0] not in LATENT_PARTS)
        note = f"{unknown[0]} is no part of latent attention that is known" if unknown else ""
        return _Region(fqn, module, roles, (module.num_heads, module.num_heads), note)
    if isinstance(module, GroupedAttention):
        num_heads = roles.row_linear.in_features // module.head_dim
        # A norm over one head sees one at a time; anything wider, or of the attention itself (sinks), sees them all.
        wide = [name for name, one in others.items() if "." not in name or tuple(one.shape) != (module.head_dim,)]
        note = f"{wide[0]} is no parameter of a single head" if wide else ""
        return _Region(fqn, module, roles, (num_heads, num_heads // module.num_key_value_groups), note)
    note = f"{min(others)} is used between its projections" if others else ""
    if isinstance(module, SparseMLP):
        note = "its activation compares all features"
    widths = {linear.out_features for linear in roles.columns.values()} | {roles.row_linear.in_features}
    if len(widths) > 1:
        note = f"its projections have several widths: {', '.join(map(str, sorted(widths)))}"
    return _Region(fqn, module, roles, note=note)


def _cut(roles: Roles) -> set[str]:
    return {*roles.columns, roles.row}


def _refuse_misfits(model: PreTrainedModel, regions: list[_Region], tp_size: int, *, may_be_none: bool) -> None:
    sizes = SharedSizes(
        frozenset(heads for one in regions for heads in one.sizes.heads),
        frozenset(width for one in regions for width in one.sizes.widths),
    )
    if problems := sizes.problems(tp_size):
        raise InputError(problems)
    if all(one.note for one in regions) and not may_be_none:
        why = f"{regions[0].fqn}: {regions[0].note}" if regions else "its projections are fused, or not linear"
        message = f"{type(model).__name__} has no attention or MLP that ranks can share: {why}"
        raise InputError(Problem(message, path=PATH, hint="remove 'tp_size'"))


def _shared(region: _Region, roles: Roles, tp_size: int, seen: _Seen) -> Boundary:
    itemsize = roles.row_linear.weight.itemsize
    kv_heads = tp_size if region.heads is None else region.heads[1]
    parameters = tuple(
        _placed(roles, name, parameter, tp_size, kv_heads)
        for name, parameter in seen.first(region.module, recurse=True)
    )
    kv_groups = region.heads[0] // tp_size if region.heads is not None and kv_heads < tp_size else None
    return Boundary(
        region.fqn,
        "mlp" if region.heads is None else "attention",
        type(region.module).__name__,
        parameters,
        _inputs(region.module, roles, itemsize),
        Edge(roles.row, PARTIAL, REPLICATE, roles.row_linear.out_features, itemsize),
        roles.row,
        kv_groups,
    )


def _placed(roles: Roles, name: str, parameter: nn.Parameter, tp_size: int, kv_heads: int) -> ParameterPlan:
    child, _, leaf = name.partition(".")
    shape = tuple(parameter.shape)
    if child == roles.row:
        # The bias is added once, after the sum.
        return ParameterPlan(name, shape, shard_dim=1 if leaf == "weight" else None)
    if child not in roles.columns:
        return ParameterPlan(name, shape, partial=True)
    if child in KV_PROJECTIONS and kv_heads < tp_size:
        return ParameterPlan(name, shape, partial=True, num_slices=kv_heads)
    return ParameterPlan(name, shape, shard_dim=0)


def _inputs(module: nn.Module, roles: Roles, itemsize: int) -> tuple[Edge, ...]:
    """The hidden states that a region computes with: what its forward takes first."""
    linears = {name: one for name, one in module.named_children() if isinstance(one, nn.Linear)}
    # Latent attention expands what it is given, so a projection may take more.
    features = max(one.in_features for name, one in linears.items() if name != roles.row)
    name = next(iter(inspect.signature(module.forward).parameters))
    return (Edge(name, REPLICATE, REPLICATE, features, itemsize, is_shared=True),)
