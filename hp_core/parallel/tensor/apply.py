"""Applying a sharding plan to a model on the meta device, before FSDP shards it over the other ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from hp_core.errors import InputError, Problem
from hp_core.model.adapters.layers import adapted_layers, base_of
from hp_core.model.around import holder_of
from hp_core.parallel.plan.boundary import Boundary, ParameterPlan, ShardingPlan
from hp_core.parallel.plan.edge import REPLICATE
from hp_core.parallel.plan.roles import GroupedAttention
from hp_core.parallel.plan.shapes import PATH
from hp_core.parallel.setup import DistributedSetup
from hp_core.parallel.tensor.adapters import share_adapters
from hp_core.parallel.tensor.random_numbers import OwnDropout
from hp_core.parallel.tensor.region import DropsAttention, Part, RowForward, SharedForward, Work
from hp_core.parallel.tensor.sequence import Sequences
from hp_core.parallel.tensor.vocabulary import VocabularyEmbedding, VocabularyHead


def apply_plan(model: nn.Module, plan: ShardingPlan, tp_mesh: DeviceMesh) -> None:
    """Shard what the plan shards, and have each shared module compute on its own parts."""
    applying = _Applying(tp_mesh, Sequences(tp_mesh.get_group()))
    for boundary in plan.shared:
        applying.apply(model.get_submodule(boundary.fqn), boundary)


def require_shared(model: nn.Module, setup: DistributedSetup) -> None:
    """Refuse a model that every tensor rank would compute whole.

    Raises:
        InputError: there are tensor ranks, and nobody called `apply_plan`.
    """
    applied = (SharedForward, VocabularyEmbedding, VocabularyHead)
    if setup.sizes.tp > 1 and not any(isinstance(holder_of(one).forward, applied) for one in model.modules()):
        message = f"no layer of {type(model).__name__} is shared among the tensor ranks"
        hint = "a model builder finishes its skeleton with hp_core.finish_model(model, distributed_setup)"
        raise InputError(Problem(message, path=PATH, hint=hint))


class _Applying:
    """A plan on its way into a model; tied weights are sharded once."""

    def __init__(self, tp_mesh: DeviceMesh, sequences: Sequences) -> None:
        self._mesh = tp_mesh
        self._group = tp_mesh.get_group()
        self._sequences = sequences
        self._sharded: dict[nn.Parameter, nn.Parameter] = {}

    def apply(self, module: nn.Module, boundary: Boundary) -> None:
        """Change one module as its boundary says."""
        if boundary.kind == "embedding":
            assert isinstance(module, nn.Embedding)
            assert boundary.output is not None
            self._shard(module, ParameterPlan("weight", tuple(module.weight.shape), shard_dim=0))
            holder_of(module).forward = VocabularyEmbedding(module, boundary.output, self._group)
        elif boundary.kind == "head":
            assert isinstance(module, nn.Linear)
            for name, parameter in list(module.named_parameters()):
                self._shard(module, ParameterPlan(name, tuple(parameter.shape), shard_dim=0))
            (hidden,) = boundary.inputs
            holder_of(module).forward = VocabularyHead(module, hidden, self._group)
        elif isinstance(module, nn.Dropout):
            module.forward = OwnDropout(module, self._group.rank())  # type: ignore[method-assign]  # an instance's own forward
        elif boundary.kind == "sequence" and not boundary.parameters:
            self._hook(module, boundary)
        else:
            self._share(module, boundary)

    def _hook(self, layer: nn.Module, boundary: Boundary) -> None:
        """The ends of the stack of layers, whose own forward transformers may recompute and so has to keep."""
        if boundary.inputs:
            self._sequences.enter(layer, boundary)
        if boundary.output is not None:
            self._sequences.leave(layer, boundary)

    def _share(self, module: nn.Module, boundary: Boundary) -> None:
        parts = [
            Part(*self._shard(module, plan), plan, self._group.rank(), self._group.size())
            for plan in boundary.parameters
            if plan.shard_dim is not None or plan.partial
        ]
        if boundary.kv_groups is not None and isinstance(module, GroupedAttention):
            module.num_key_value_groups = boundary.kv_groups
        if boundary.row is not None:
            row = module.get_submodule(boundary.row)
            linear = base_of(row)
            assert isinstance(linear, nn.Linear)
            assert boundary.output is not None
            row.forward = RowForward(row, linear, boundary.output, self._sequences)
            if boundary.output.dst.kind == "shard":
                self._drop_apart(module)
        work = _work(boundary)
        draws_apart = work == "share" and isinstance(module, DropsAttention) and module.attention_dropout > 0
        share_adapters(module, boundary, self._group, draws_apart=draws_apart)
        holder = holder_of(module)
        holder.forward = SharedForward(
            module,
            parts,
            boundary.inputs,
            self._group,
            forward=holder.forward,
            output=None if boundary.row is not None else boundary.output,
            sequence=self._sequences,
            work=work,
        )

    def _drop_apart(self, region: nn.Module) -> None:
        of_adapters = {one for layer in adapted_layers(region).values() for one in layer.modules()}
        for one in region.modules():
            if isinstance(one, nn.Dropout) and one not in of_adapters:
                one.forward = OwnDropout(one, self._group.rank())  # type: ignore[method-assign]  # as above

    def _shard(self, module: nn.Module, plan: ParameterPlan) -> tuple[nn.Module, str]:
        """Make a DTensor of a parameter; returns the module that has it and its name there."""
        path, _, leaf = plan.name.rpartition(".")
        owner = module.get_submodule(path)
        parameter = owner.get_parameter(leaf)
        if parameter not in self._sharded:
            distributed = _distributed(parameter, plan, self._mesh)
            self._sharded[parameter] = nn.Parameter(distributed, parameter.requires_grad)
        owner._parameters[leaf] = self._sharded[parameter]
        return owner, leaf


def _work(boundary: Boundary) -> Work:
    if boundary.kind not in ("attention", "mlp", "contract"):
        return "tokens"
    # One whose output is whole may still be there to give or take hidden states in parts.
    return "whole" if boundary.output is None or boundary.output.src == REPLICATE else "share"


def _distributed(parameter: nn.Parameter, plan: ParameterPlan, tp_mesh: DeviceMesh) -> DTensor:
    placement: Placement = Replicate() if plan.shard_dim is None else Shard(plan.shard_dim)
    # Without a source rank nothing is sent: there are no values yet.
    with torch.no_grad():
        return distribute_tensor(parameter.detach(), tp_mesh, [placement], src_data_rank=None)
