"""A model's and an optimizer's tensors under flat names, the same for every layout, and back into place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from hp_core.errors import InputError, RunError
from hp_core.parallel.pipeline.stages import elsewhere

MODEL = "model/"
OPTIMIZER = "optimizer/"


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters and persistent buffers by `model/FQN`; the tensors themselves, not copies.

    Raises:
        RunError: its state holds something else, which would have to be pickled.
    """
    found = {}
    for fqn, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise RunError(f"model: {fqn!r} of its state is a {type(value).__name__}; only tensors can be saved")
        found[f"{MODEL}{fqn}"] = value.detach()
    return found


def optimizer_tensors(model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, torch.Tensor]:
    """The optimizers' state by `optimizer/FQN/key`, read as it is: asking for it never takes a step."""
    return {
        f"{OPTIMIZER}{fqn}/{key}": value
        for fqn, state in _states(model, optimizers)
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def optimizer_scalars(model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, dict[str, Any]]:
    """The optimizers' state that is plain numbers, by FQN and key.

    Raises:
        RunError: a state value is neither a tensor nor a number; it could not be restored.
    """
    scalars: dict[str, dict[str, Any]] = {}
    for fqn, state in _states(model, optimizers):
        for key, value in state.items():
            if isinstance(value, torch.Tensor) or value is None:
                continue
            if not isinstance(value, (bool, int, float, str)):
                raise RunError(f"optimizer state {key!r} of {fqn} is a {type(value).__name__}; it can't be saved")
            scalars.setdefault(fqn, {})[key] = value
    return scalars


def optimizer_keys(model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, list[str]]:
    """What the optimizers hold of each parameter that they hold anything of, by FQN: the names, sorted."""
    return {
        fqn: sorted(key for key, value in state.items() if value is not None)
        for fqn, state in _states(model, optimizers)
        if state
    }


def require_whole_state(
    wanted: Mapping[str, Sequence[str]],
    tensors: Iterable[str],
    scalars: Mapping[str, Mapping[str, Any]],
    path: Path,
) -> None:
    """Refuse a checkpoint that lacks a part of what an optimizer held of a parameter, or has more than it held.

    Args:
        wanted: what was saved, see `optimizer_keys`.
        tensors: the names of the checkpoint's tensors.
        scalars: its numbers, see `optimizer_scalars`.
        path: the checkpoint.

    Raises:
        InputError: names the parameter and what differs.
    """
    found: dict[str, set[str]] = {fqn: set(values) for fqn, values in scalars.items()}
    for name in tensors:
        if name.startswith(OPTIMIZER):
            fqn, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
            found.setdefault(fqn, set()).add(key)
    for fqn in sorted(set(wanted) | set(found)):
        differing = set(wanted.get(fqn, ())) ^ found.get(fqn, set())
        if differing:
            key = min(differing)
            what = "lacks" if key in wanted.get(fqn, ()) else "has, though it was not saved,"
            raise InputError(f"{path}: {what} the optimizer state {key!r} of {fqn!r}")


def empty_optimizer_tensors(model: nn.Module, metadata: Metadata) -> dict[str, torch.Tensor]:
    """Room for every optimizer tensor that a checkpoint holds, laid out as the parameter it belongs to.

    Raises:
        InputError: the checkpoint has state for a parameter that this model does not have.
    """
    parameters = dict(model.named_parameters())
    room: dict[str, torch.Tensor] = {}
    for name, stored in metadata.state_dict_metadata.items():
        if not name.startswith(OPTIMIZER) or not isinstance(stored, TensorStorageMetadata):
            continue
        fqn = name.removeprefix(OPTIMIZER).rpartition("/")[0]
        if fqn not in parameters:
            if any(fqn.startswith(f"{other}.") for other in elsewhere(model)):
                continue
            raise InputError(f"the checkpoint has optimizer state for {fqn!r}, which this model does not have")
        parameter = parameters[fqn]
        dtype = stored.properties.dtype
        if tuple(stored.size) == tuple(parameter.shape):
            room[name] = torch.empty_like(parameter.detach(), dtype=dtype)
        else:
            room[name] = torch.empty(stored.size, dtype=dtype, device=parameter.device)
    return room


def require_same_model(
    tensors: Mapping[str, torch.Tensor], metadata: Metadata, path: Path, others: Sequence[str] = ()
) -> None:
    """Refuse a checkpoint whose model has other parameters or buffers than `tensors`, or others of their kind.

    Args:
        tensors: what this rank's model has, see `model_tensors`.
        metadata: what the checkpoint has.
        path: the checkpoint.
        others: the names of modules that other ranks have.

    Raises:
        InputError: names the first that one of them lacks, or whose dtype or shape differs.
    """
    stored = {name: value for name, value in metadata.state_dict_metadata.items() if name.startswith(MODEL)}
    there = tuple(f"{MODEL}{name}." for name in others)
    missing = set(tensors) - set(stored)
    extra = {name for name in set(stored) - set(tensors) if not name.startswith(there)}
    for names, what in ((missing, "not in the checkpoint"), (extra, "not in the recipe's model")):
        if names:
            raise InputError(f"{path}: made with another model: {min(names).removeprefix(MODEL)!r} is {what}")
    for name, tensor in tensors.items():
        saved = stored[name]
        if not isinstance(saved, TensorStorageMetadata):
            continue
        found, wanted = (saved.properties.dtype, tuple(saved.size)), (tensor.dtype, tuple(tensor.shape))
        if found != wanted:
            raise InputError(
                f"{path}: made with another model: {name.removeprefix(MODEL)!r} is {found[0]} {found[1]} there and "
                f"{wanted[0]} {wanted[1]} in the recipe's model"
            )


def restore_optimizers(
    model: nn.Module,
    optimizers: Iterable[Optimizer],
    tensors: Mapping[str, torch.Tensor],
    scalars: Mapping[str, Mapping[str, Any]],
) -> None:
    """Put loaded state in place of whatever the optimizers hold. A parameter without saved state gets none."""
    parameters = dict(model.named_parameters())
    state: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        fqn, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
        state.setdefault(fqn, {})[key] = tensor
    for fqn, values in scalars.items():
        state.setdefault(fqn, {}).update(values)
    for optimizer in optimizers:
        mine = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        optimizer.state.clear()
        for fqn, values in state.items():
            if parameters.get(fqn) in mine:
                optimizer.state[parameters[fqn]] = values


def _states(model: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, dict[str, Any]]]:
    names: dict[torch.Tensor, str] = {parameter: fqn for fqn, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if parameter not in names:
                raise KeyError("the optimizer holds state for a tensor that is no parameter of the model")
            yield names[parameter], state
