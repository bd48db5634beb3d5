"""The original layout of a model while its weights are made: transformers loads and initialises its own modules.

A replacement with other tensors than the module it replaces gets them by converting those of the original. So a
checkpoint is read, and initial weights are drawn, exactly as for the plain model, whatever was replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from hp_core.errors import InputError, Problem
from hp_core.model.replacement.contract import ResetsBuffers
from hp_core.model.replacement.replacer import Replaced
from hp_core.model.replacement.transforms import TransformError, names_of, to_replaced
from hp_core.parallel.pipeline.stages import elsewhere
from hp_core.parallel.setup import DistributedSetup


@contextmanager
def original_layout(model: nn.Module, replaced: Sequence[Replaced], setup: DistributedSetup) -> Iterator[None]:
    """Put the original modules back for the time of the `with` block, and then the replacements with their weights.

    The model is sharded already. Tensors that both modules hold are the same objects in both; those of a layout that
    a replacement changes are sharded like the model, so no rank ever holds more than one module's whole tensors.
    Every rank calls it: converting gathers.

    Raises:
        InputError: a conversion there and back changes a weight.
    """
    others = tuple(f"{fqn}." for fqn in elsewhere(model))
    here = [one for one in replaced if not f"{one.fqns[0]}.".startswith(others)]
    for one in here:
        _give(one.replacement, one.original, _kept(one))
        _make_room(one, setup)
        _install(model, one, one.original)
    yield
    for one in here:
        _install(model, one, one.replacement)
        _give(one.original, one.replacement, _kept(one))
        _convert(one, setup)
        if isinstance(one.replacement, ResetsBuffers):
            _reset_buffers(one.replacement, setup)
        _free(one)
    if setup.replacer is not None:
        setup.replacer.unfilled -= {one.fqns[0] for one in replaced}


@torch.no_grad()
def keep_own_part(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of a whole tensor, which every rank has, into a parameter, sharded or not."""
    if isinstance(parameter, DTensor):
        parameter.to_local().copy_(_own_part(parameter, whole).to_local())
    else:
        parameter.copy_(whole)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, gathered if it is sharded. Every rank calls it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _own_part(parameter: DTensor, whole: torch.Tensor) -> DTensor:
    # Without a source rank nothing is sent: every rank has the same whole tensor.
    whole = whole.to(parameter.device_mesh.device_type)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _kept(one: Replaced) -> list[str]:
    """The names of the tensors that both modules hold."""
    changed = set(names_of(one.transforms)[0])
    buffers = one.original.named_buffers(remove_duplicate=False)
    parameters = one.original.named_parameters(remove_duplicate=False)
    return [name for name, _ in (*parameters, *buffers) if name not in changed]


def _give(source: nn.Module, receiver: nn.Module, names: Sequence[str]) -> None:
    """Make `receiver` hold the tensors of `source`, which may have changed since both were made."""
    for name in names:
        _set(receiver, name, _get(source, name))


def _get(module: nn.Module, name: str) -> torch.Tensor:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    tensor = owner._parameters[leaf] if leaf in owner._parameters else owner._buffers[leaf]
    assert tensor is not None
    return tensor


def _set(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        if not isinstance(tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=False)
        owner._parameters[leaf] = tensor
    else:
        owner._buffers[leaf] = tensor


def _install(model: nn.Module, one: Replaced, module: nn.Module) -> None:
    for fqn in one.fqns:
        model.set_submodule(fqn, module, strict=True)


def _make_room(one: Replaced, setup: DistributedSetup) -> None:
    """Give the original tensors that are converted later storage of the same kind as the replacement's."""
    for transform in one.transforms:
        like = _get(one.replacement, transform.replacements[0])
        for name in transform.originals:
            if _is_shared(one, name):
                continue
            meta = _get(one.original, name)
            device = like.device
            if isinstance(like, DTensor):
                tensor: torch.Tensor = distribute_tensor(
                    torch.empty(meta.shape, dtype=meta.dtype, device=device),
                    like.device_mesh,
                    _placements(like, meta),
                    src_data_rank=None,
                )
            else:
                tensor = torch.empty(meta.shape, dtype=meta.dtype, device=device)
            if isinstance(meta, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=meta.requires_grad)
            _set(one.original, name, tensor)


def _is_shared(one: Replaced, name: str) -> bool:
    """Whether the replacement has taken over the submodule that holds a tensor of the original, as after a renaming."""
    owner = one.original.get_submodule(name.rpartition(".")[0])
    return any(part is owner for part in one.replacement.modules())


def _placements(like: DTensor, original: torch.Tensor) -> list[Placement]:
    """Shard the original along its first dimension wherever the replacement's tensor is sharded at all."""
    return [Shard(0) if one.is_shard() and original.dim() else Replicate() for one in like.placements]


@torch.no_grad()
def _convert(one: Replaced, setup: DistributedSetup) -> None:
    for transform in one.transforms:
        originals = {name: whole(_get(one.original, name).to(setup.device)) for name in transform.originals}
        try:
            converted = to_replaced([transform], originals)
        except TransformError as error:
            message = f"{one.fqns[0]}: weight_transforms: {error}"
            raise InputError(Problem(message, f"{one.rule.path}.replace_module")) from error
        for name, value in converted.items():
            _fill(one.replacement, name, value, setup)


def _fill(replacement: nn.Module, name: str, value: torch.Tensor, setup: DistributedSetup) -> None:
    tensor = _get(replacement, name)
    if tensor.device.type != "meta":
        keep_own_part(tensor, value)
        return
    own = _own_part(tensor, value) if isinstance(tensor, DTensor) else value.to(setup.device).clone()
    filled = nn.Parameter(own, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else own
    _set(replacement, name, filled)


def _reset_buffers(replacement: nn.Module, setup: DistributedSetup) -> None:
    for name, buffer in list(replacement.named_buffers()):
        if buffer.device.type == "meta":
            _set(replacement, name, torch.empty_like(buffer, device=setup.device))
    assert isinstance(replacement, ResetsBuffers)
    replacement.reset_buffers()


def _free(one: Replaced) -> None:
    """Drop the weights of the original module, whose place the replacement has taken."""
    for name in names_of(one.transforms)[0]:
        if _is_shared(one, name):
            continue
        tensor = _get(one.original, name)
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        _set(one.original, name, nn.Parameter(empty, requires_grad=False) if is_parameter else empty)
