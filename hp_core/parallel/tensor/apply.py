"""Applying a sharding plan to a model on the meta device, before FSDP shards it over the other ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel

from hp_core.errors import InputError, Problem
from hp_core.parallel.plan.boundary import Boundary, ParameterPlan, ShardingPlan
from hp_core.parallel.plan.derive import derive_plan
from hp_core.parallel.plan.roles import GroupedAttention
from hp_core.parallel.plan.shapes import PATH
from hp_core.parallel.setup import DistributedSetup
from hp_core.parallel.tensor.region import Part, RowForward, SharedForward


def share_tensors(model: PreTrainedModel, setup: DistributedSetup) -> ShardingPlan:
    """Derive the plan of `model` and apply it, in place: parameters become DTensors on the tensor axis.

    Raises:
        InputError: see `derive_plan`.
    """
    plan = derive_plan(model, setup.sizes.tp)
    apply_plan(model, plan, setup.mesh["tp"])
    return plan


def apply_plan(model: nn.Module, plan: ShardingPlan, tp_mesh: DeviceMesh) -> None:
    """Shard what the plan shards, and have each shared module compute on its own parts."""
    for boundary in plan.shared:
        _apply(model.get_submodule(boundary.fqn), boundary, tp_mesh)


def require_shared(model: nn.Module, setup: DistributedSetup) -> None:
    """Refuse a model that every tensor rank would compute whole.

    Raises:
        InputError: there are tensor ranks, and nobody called `share_tensors`.
    """
    if setup.sizes.tp > 1 and not any(isinstance(one.forward, SharedForward) for one in model.modules()):
        message = f"no layer of {type(model).__name__} is shared among the tensor ranks"
        hint = "a model builder finishes its skeleton with hp_core.finish_model(model, distributed_setup)"
        raise InputError(Problem(message, path=PATH, hint=hint))


def _apply(module: nn.Module, boundary: Boundary, tp_mesh: DeviceMesh) -> None:
    group, tp_rank = tp_mesh.get_group(), tp_mesh.get_local_rank()
    parts = []
    for plan in boundary.parameters:
        if plan.shard_dim is None and not plan.partial:
            continue
        path, _, leaf = plan.name.rpartition(".")
        owner = module.get_submodule(path)
        parameter = owner.get_parameter(leaf)
        owner._parameters[leaf] = nn.Parameter(_distributed(parameter, plan, tp_mesh), parameter.requires_grad)
        parts.append(Part(owner, leaf, plan, tp_rank, tp_mesh.size()))
    if boundary.kv_groups is not None and isinstance(module, GroupedAttention):
        module.num_key_value_groups = boundary.kv_groups
    output = boundary.output
    if boundary.row is not None and output is not None:
        row = module.get_submodule(boundary.row)
        assert isinstance(row, nn.Linear)
        row.forward = RowForward(row, output, group)  # type: ignore[method-assign]  # an instance's own forward
        output = None
    module.forward = SharedForward(module, parts, boundary.inputs, group, output)


def _distributed(parameter: nn.Parameter, plan: ParameterPlan, tp_mesh: DeviceMesh) -> DTensor:
    placement: Placement = Replicate() if plan.shard_dim is None else Shard(plan.shard_dim)
    # Without a source rank nothing is sent: there are no values yet.
    with torch.no_grad():
        return distribute_tensor(parameter.detach(), tp_mesh, [placement], src_data_rank=None)
