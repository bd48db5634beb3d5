"""Finding the experts of a mixture by their structure, and spreading them over the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator

from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from hp_core.errors import InputError, Problem
from hp_core.model.around import holder_of
from hp_core.parallel.expert.count import indivisible
from hp_core.parallel.expert.dispatch import Dispatch, dispatch_of, num_experts_of
from hp_core.parallel.setup import DistributedSetup

# What the forward of a module of experts takes; gpt-oss has other words for the same.
_ARGUMENTS = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)
_PATH = "accelerator.ep_size"
_HINT = "remove 'ep_size'"


def spread_experts(model: nn.Module, setup: DistributedSetup, names: Collection[str] | None = None) -> list[nn.Module]:
    """Leave each rank of the `ep` axis its part of the experts of every layer of `model`, in place.

    With `names`, only of these modules. Returns the modules that hold them. Their parameters, whole on every rank
    before or on the meta device, become DTensors sharded by expert, and their forward sends tokens to the experts'
    ranks: tensor ranks, which hold the same tokens, each their part of them.

    Raises:
        InputError: the model has no experts, or holds them in a way that is not understood, or their number doesn't
            divide.
    """
    assert setup.expert_mesh is not None
    mesh = setup.expert_mesh["ep"]
    tensor_group = setup.mesh.get_group("tp") if setup.sizes.tp > 1 else None
    found = {fqn: one for fqn, one in experts_of(model, mesh.size()).items() if names is None or fqn in names}
    for module in found.values():
        for name, parameter in list(module.named_parameters(recurse=False)):
            own = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(own, requires_grad=parameter.requires_grad))
        holder = holder_of(module)
        holder.forward = dispatch_of(module, holder.forward, mesh.get_group(), tensor_group)
    return list(found.values())


def experts_of(model: nn.Module, num_ranks: int) -> dict[str, nn.Module]:
    """The modules that hold experts, by name, if so many ranks can share them.

    Raises:
        InputError: see `spread_experts`.
    """
    found = dict(_fused_experts(model))
    if not found:
        message = f"{type(model).__name__} holds no experts in fused parameters"
        raise InputError(Problem(message, path=_PATH, hint=_HINT))
    problems = [problem for fqn, module in found.items() for problem in _problems(fqn, module, num_ranks)]
    if problems:
        # Of what is wrong in every layer alike, the first tells.
        by_kind = {one.message.partition(": ")[2] or one.message: one for one in reversed(problems)}
        raise InputError(list(reversed(by_kind.values())))
    return found


def _fused_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that hold a matrix for each of their experts in one parameter."""
    for fqn, module in model.named_modules():
        if holds_experts(module):
            yield fqn, module


def holds_experts(module: nn.Module) -> bool:
    """Whether a module holds a matrix for each of its experts in one parameter."""
    number = num_experts_of(module)
    return any(one.ndim > 2 and len(one) == number for one in module.parameters(recurse=False))


def _problems(fqn: str, module: nn.Module, num_ranks: int) -> Iterator[Problem]:
    number = num_experts_of(module)
    assert number is not None
    where = f"{fqn}: {type(module).__name__}"
    takes = tuple(inspect.signature(module.forward).parameters)
    others = [
        name
        for name, parameter in module.named_parameters()
        if "." in name or not parameter.ndim or len(parameter) != number
    ]
    if takes not in _ARGUMENTS:
        message = f"{where} can't be spread: its forward takes ({', '.join(takes)}), not ({', '.join(_ARGUMENTS[0])})"
        yield Problem(message, path=_PATH, hint=_HINT)
    elif others:
        message = f"{where} can't be spread: {others[0]!r} belongs to no single expert"
        yield Problem(message, path=_PATH, hint=_HINT)
    elif problem := indivisible(number, num_ranks):
        yield problem


def require_spread(model: nn.Module, setup: DistributedSetup) -> None:
    """Refuse a model whose experts every rank would hold.

    Raises:
        InputError: there are expert ranks, and nobody called `spread_experts`.
    """
    if setup.expert_mesh is None or setup.sizes.pp > 1:
        # A stage may have none.
        return
    if not any(isinstance(holder_of(module).forward, Dispatch) for module in model.modules()):
        message = f"no experts of {type(model).__name__} are spread over the expert ranks"
        hint = "a model builder finishes its skeleton with hp_core.finish_model(model, distributed_setup)"
        raise InputError(Problem(message, path=_PATH, hint=hint))
