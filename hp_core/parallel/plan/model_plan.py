"""The plan of a whole model on all axes, derived in one process, on meta, however many ranks there will be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from hp_core.errors import InputError
from hp_core.parallel.expert.experts import experts_of
from hp_core.parallel.plan.boundary import ShardingPlan
from hp_core.parallel.plan.derive import derive_plan
from hp_core.parallel.plan.layout import (
    Cut,
    ModelLayout,
    ParameterLayout,
    axis_sizes,
    expert_shard_dim,
    fsdp_cuts,
    unsharable_experts,
)
from hp_core.parallel.sizes import ParallelSizes


@dataclass(frozen=True)
class ModelPlan:
    """How a model lies on the ranks of these sizes, and what they exchange. Data alone: nothing is applied yet.

    `tensors` is what tensor ranks share, None where there is one.
    """

    sizes: ParallelSizes
    layout: ModelLayout
    tensors: ShardingPlan | None = None

    @property
    def total_parameters(self) -> int:
        """The elements of the whole model."""
        return self.layout.total

    def local_parameters(self, rank: int) -> int:
        """The elements that a rank holds. See `ModelLayout.local_parameters`."""
        return self.layout.local_parameters(rank)


def plan_model(model: PreTrainedModel, sizes: ParallelSizes) -> ModelPlan:
    """The plan of `model`, on whatever device, for a run of these sizes; nothing of the model is changed.

    Its cost grows with the modules of the model, not with the ranks.

    Raises:
        InputError: heads, widths or experts can't be shared by so many ranks.
    """
    tensors = derive_plan(model, sizes.tp) if sizes.tp > 1 else None
    return ModelPlan(sizes, ModelLayout(sizes, tuple(_layouts(model, sizes, tensors))), tensors)


def _layouts(model: nn.Module, sizes: ParallelSizes, tensors: ShardingPlan | None) -> Iterator[ParameterLayout]:
    experts = experts_of(model, sizes.ep) if sizes.ep > 1 else {}
    by_tensors = _tensor_cuts(tensors)
    axes = axis_sizes(sizes)
    for fqn, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if fqn.rpartition(".")[0] in experts:
            cuts = _expert_cuts(shape, axes)
        else:
            cuts = fsdp_cuts(by_tensors.get(fqn, ()), shape, axes["fsdp"])
        yield ParameterLayout(fqn, shape, cuts)


def _tensor_cuts(tensors: ShardingPlan | None) -> Mapping[str, tuple[Cut, ...]]:
    if tensors is None:
        return {}
    return {
        f"{boundary.fqn}.{one.name}": (Cut("tp", one.shard_dim, tensors.tp_size),)
        for boundary in tensors.boundaries
        for one in boundary.parameters
        if one.shard_dim is not None
    }


def _expert_cuts(shape: tuple[int, ...], axes: Mapping[str, int]) -> tuple[Cut, ...]:
    num_own, num_shards = shape[0] // axes["ep"], axes["efsdp"]
    dim = expert_shard_dim(num_own, shape, num_shards)
    if dim is None:
        raise InputError(unsharable_experts(num_own, shape[-1], num_shards))
    among_holders = (Cut("efsdp", dim, num_shards),) if num_shards > 1 else ()
    return (Cut("ep", 0, axes["ep"]), *among_holders)
