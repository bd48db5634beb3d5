"""A plan in validate mode: modules compute on DTensors, and torch's own propagation says how their outputs lie."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from hp_core.entry_points import describe
from hp_core.errors import InputError, Problem
from hp_core.parallel.plan.boundary import Boundary, ShardingPlan
from hp_core.parallel.plan.edge import PARTIAL, REPLICATE, Placement, shard

_OPERATOR = re.compile(r"(?:aten|_c10d_functional|_dtensor)[.:]+\w+(?:\.\w+)?")


@dataclass(frozen=True)
class Unchecked:
    """A boundary that propagation says nothing of, and why: mostly an operator that knows no DTensors."""

    fqn: str
    reason: str


def validate_plan(model: PreTrainedModel, plan: ShardingPlan, inputs: Mapping[str, Any]) -> tuple[Unchecked, ...]:
    """Compare `out_src` of every boundary with what torch's DTensor propagates through the module's own forward.

    One process is enough: where there is no process group, a fake one takes its place. Each module is called
    with what it is given in a plain forward pass, laid out as its edges say.

    Args:
        model: with its parameters on a device, of any values, and not sharded; a small one of the same kind will do.
        plan: its plan; `derive_plan` makes one, with the contracts of a recipe.
        inputs: keywords of the model's forward.

    Returns:
        The boundaries that couldn't be checked.

    Raises:
        InputError: outputs lie otherwise than the plan says; each with its module, what is expected and what was found.
            Or there is a process group, and it is not of `plan.tp_size` ranks.
    """
    modules = {one.fqn: model.get_submodule(one.fqn) for one in plan.shared if one.output is not None}
    unchecked: list[Unchecked] = []
    problems: list[Problem] = []
    with _single_operators(model), _mesh(plan.tp_size) as mesh:
        calls = _calls(model, modules, inputs)
        for boundary in plan.shared:
            if boundary.output is None:
                continue
            if boundary.fqn not in calls:
                unchecked.append(Unchecked(boundary.fqn, "these inputs don't reach it"))
                continue
            try:
                found = _propagated(modules[boundary.fqn], boundary, *calls[boundary.fqn], mesh)
            except Exception as error:
                operator = _OPERATOR.search(str(error))
                reason = f"{operator.group()} can't be dispatched" if operator else describe(error)
                unchecked.append(Unchecked(boundary.fqn, reason))
                continue
            problems += _mismatch(boundary, found)
    if problems:
        raise InputError(problems)
    return tuple(unchecked)


@contextmanager
def _single_operators(model: PreTrainedModel) -> Iterator[None]:
    """Attention of single operators: fused ones on the CPU propagate for minutes, or not at all."""
    implementation, was_training = model.config._attn_implementation, model.training
    model.eval()
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)
        model.train(was_training)


def _calls(
    model: PreTrainedModel, modules: Mapping[str, nn.Module], inputs: Mapping[str, Any]
) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """The first call of each module in a plain pass."""
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    with ExitStack() as stack:
        for fqn, module in modules.items():

            def keep(_: nn.Module, args: Any, kwargs: Any, fqn: str = fqn) -> None:
                calls.setdefault(fqn, (args, kwargs))

            stack.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)
        with torch.no_grad():
            # A cache would hold the keys of the first call in the second.
            model(**{**inputs, "use_cache": False})
    return calls


def _propagated(
    module: nn.Module, boundary: Boundary, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh
) -> DTensor:
    """The output of a boundary's module, or of its row, as DTensor lays it out."""
    names = _names(module)
    edges = {edge.name: edge.dst for edge in boundary.inputs}

    def laid(name: str | None, value: Any) -> Any:
        return tree_map(lambda one: _distributed(one, edges.get(name or "", REPLICATE), mesh), value)

    found: list[Any] = []
    with ExitStack() as stack:
        for plan in boundary.parameters:
            path, _, leaf = plan.name.rpartition(".")
            owner = module.get_submodule(path)
            parameter = owner._parameters[leaf]
            assert parameter is not None
            stack.callback(owner._parameters.__setitem__, leaf, parameter)
            # The bias of a row is added after the sum, which is beyond the boundary's own computation.
            is_row_bias = boundary.row is not None and plan.name == f"{boundary.row}.bias".lstrip(".")
            laid_out = None if is_row_bias else nn.Parameter(_distributed(parameter.detach(), plan.placement, mesh))
            owner._parameters[leaf] = laid_out
        if boundary.row:
            row = module.get_submodule(boundary.row)
            stack.callback(row.register_forward_hook(lambda *call: found.append(call[2])).remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(implicit_replication())
        named = {name: laid(name, value) for name, value in kwargs.items()}
        values = [laid(names[index] if index < len(names) else None, value) for index, value in enumerate(args)]
        output = module(*values, **named)
    result = found[0] if found else output[0] if isinstance(output, tuple) else output
    assert isinstance(result, DTensor), "its output is no DTensor"
    return result


def _names(module: nn.Module) -> Sequence[str]:
    return list(inspect.signature(module.forward).parameters)


def _distributed(value: Any, placement: Placement, mesh: DeviceMesh) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    whole = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return whole if placement.dim is None else whole.redistribute(mesh, [Shard(placement.dim % value.ndim)])


def _mismatch(boundary: Boundary, found: DTensor) -> Iterator[Problem]:
    assert boundary.output is not None
    expected = boundary.output.src
    (placement,) = found.placements
    if isinstance(placement, Partial):
        actual = PARTIAL
    else:
        actual = shard(placement.dim) if isinstance(placement, Shard) else REPLICATE
    wanted = expected if expected.dim is None else shard(expected.dim % found.ndim)
    if actual != wanted:
        where = f"the output of {boundary.row}" if boundary.row else "its output"
        message = f"{boundary.fqn}: {where} is planned as {expected}, and computed it is {actual}"
        yield Problem(message, path="plan_overrides", hint=f"write out_src: {{tp: {actual}}}, or other params")


@contextmanager
def _mesh(tp_size: int) -> Iterator[DeviceMesh]:
    """A mesh of `tp_size` ranks: of the process group, or of a fake one."""
    if dist.is_initialized():
        if dist.get_world_size() != tp_size:
            message = f"the plan is for {tp_size} tensor ranks, and the process group has {dist.get_world_size()}"
            raise InputError(Problem(message, hint="validate it in a process without a group"))
        yield init_device_mesh("cpu", (tp_size,), mesh_dim_names=("tp",))
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp_size)
    try:
        yield init_device_mesh("cpu", (tp_size,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()
