"""FSDP2 and HSDP: sharding a model over the data axes so that gradients are sums, not averages."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from hp_core.config.models import MixedPrecisionConfig
from hp_core.errors import InputError, RunError
from hp_core.model.around import holder_of
from hp_core.model.units import blocks
from hp_core.parallel.dtypes import DTYPES
from hp_core.parallel.expert.dispatch import Dispatch
from hp_core.parallel.expert.experts import spread_experts
from hp_core.parallel.pipeline.runner import members_of, pipeline_of
from hp_core.parallel.plan.layout import expert_shard_dim, fsdp_dim, unsharable_experts
from hp_core.parallel.prefetch import prefetch_blocks, require_depths
from hp_core.parallel.setup import DistributedSetup


def shard_model(model: nn.Module, setup: DistributedSetup) -> None:
    """Apply FSDP2 to each block and to the root, in place.

    A single process without a compute dtype needs none of it and is left as it is. Gradients are summed over the
    data ranks, not averaged: the engine divides every loss by the whole step's count itself, so uneven ranks stay
    exact.
    """
    policy = mixed_precision_policy(setup.precision)
    if setup.world_size == 1 and policy is None:
        return
    if setup.expert_mesh is not None:
        _shard_experts(model, setup, setup.expert_mesh, policy or MixedPrecisionPolicy())
    pipeline, reshards = pipeline_of(model), _reshards(setup, setup.mesh["fsdp"].size())
    if pipeline is not None:
        # All ranks refuse what is too much for one of them.
        require_depths(setup.fsdp, min(map(len, pipeline.split)), "the smallest stage")
    roots: list[nn.Module] = [model] if pipeline is None else [stage.view for stage in pipeline.stages]
    for root in roots:
        units = blocks(root)
        for unit in [*(module for _, module in units), root]:
            _shard(
                unit,
                setup.fsdp_mesh,
                reshard_after_forward=reshards and unit is not root,
                mp_policy=policy or MixedPrecisionPolicy(),
                shard_placement_fn=partial(_without_padding, num_shards=setup.mesh["fsdp"].size()),
            )
        prefetch_blocks(root, units, setup.fsdp)


def _shard(module: nn.Module, mesh: DeviceMesh, **settings: Any) -> None:
    fully_shard(module, mesh=mesh, **settings)
    assert isinstance(module, FSDPModule)
    if mesh.size() > 1:  # of one rank, the mean is the sum, and dividing by one is a pass over all gradients
        module.set_gradient_divide_factor(1.0)
        # A divide factor of one is refused by gloo as a scaled sum unless a plain sum is asked for.
        module.set_force_sum_reduction_for_comms(True)


def _without_padding(parameter: nn.Parameter, num_shards: int) -> Shard | None:
    if isinstance(parameter, DTensor) and not all(isinstance(one, Replicate) for one in parameter.placements):
        return None
    return Shard(fsdp_dim(parameter.shape, num_shards))


def _shard_experts(model: nn.Module, setup: DistributedSetup, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Share each rank's own experts with the ranks that hold the same."""
    shards = mesh["dp_replicate", "efsdp"] if setup.sizes.dp_replicate > 1 else mesh["efsdp"]
    spread = _spread(model)
    for experts in spread if spread or setup.sizes.pp > 1 else spread_experts(model, setup):
        _shard(
            experts,
            shards,
            reshard_after_forward=_reshards(setup, mesh["efsdp"].size()),
            # The block has cast its inputs already, and a router may weigh in fp32 on purpose.
            mp_policy=replace(policy, cast_forward_inputs=False),
            shard_placement_fn=partial(_expert_shards, num_shards=mesh["efsdp"].size()),
        )


def _reshards(setup: DistributedSetup, num_shards: int) -> bool:
    written = setup.fsdp.reshard_after_forward
    # Of a rank that holds all parameters nothing is gathered, but what is cast would be cast again.
    return setup.sizes.pp == 1 and num_shards > 1 if written is None else written


def _spread(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(holder_of(module).forward, Dispatch)]


def _expert_shards(parameter: nn.Parameter, num_shards: int) -> Shard:
    """How the ranks that hold the same experts share them."""
    assert isinstance(parameter, DTensor)
    num_own = len(parameter.to_local())
    dim = expert_shard_dim(num_own, parameter.shape, num_shards)
    if dim is None:
        raise InputError(unsharable_experts(num_own, parameter.shape[-1], num_shards))
    return Shard(dim)


def mixed_precision_policy(precision: MixedPrecisionConfig) -> MixedPrecisionPolicy | None:
    """FSDP2's policy for the recipe's dtypes, or None where everything stays in the master weights' dtype."""
    if precision.param_dtype is None and precision.reduce_dtype is None:
        return None
    return MixedPrecisionPolicy(
        param_dtype=_dtype(precision.param_dtype), reduce_dtype=_dtype(precision.reduce_dtype or "float32")
    )


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Reduce gradients in the next backward pass or only add them up locally."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        model.set_is_last_backward(enabled)


def reshard(model: nn.Module) -> None:
    """Free what a forward pass without a backward pass has left gathered.

    Until then the model's parameters are the gathered ones: whoever lists them (an optimizer, a checkpoint) would
    hold tensors that the next step no longer uses.
    """
    for module in members_of(model):
        if isinstance(module, FSDPModule):
            module.reshard()


def require_sharded(model: nn.Module, setup: DistributedSetup) -> None:
    """Refuse a model whose gradients nobody would add up over the ranks.

    Raises:
        RunError: with several ranks, a trainable parameter is a plain tensor.
    """
    if setup.world_size == 1:
        return
    plain = [name for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if plain:
        raise RunError(
            f"model: {len(plain)} trainable parameters are not sharded over the {setup.world_size} ranks "
            f"({plain[0]} first); a model builder must call hp_core.parallel.fsdp.shard_model(model, distributed_setup)"
        )


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else DTYPES[name]
