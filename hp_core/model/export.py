"""A trained model as a plain Hugging Face directory, whatever its layout and however it is sharded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from hp_core.errors import RunError
from hp_core.model.replacement.contract import WeightTransform, transforms_of
from hp_core.model.replacement.layout import whole
from hp_core.model.replacement.transforms import names_of, to_original
from hp_core.parallel.pipeline.runner import pipeline_of


def export_model(model: nn.Module, directory: str | Path) -> None:
    """Write `model` so that `from_pretrained` of plain transformers loads it: safetensors and config.json.

    Every rank calls it; the main rank writes, and holds the whole model in host memory while it does. The layout is
    transformers' own on disk: replaced modules are converted back, and what its classes fuse is split again.

    Raises:
        RunError: `model` is no model of transformers.
    """
    if not isinstance(model, PreTrainedModel):
        raise RunError(f"a {type(model).__name__} can't be exported: it is no model of transformers")
    tensors = original_tensors(model)
    if not dist.is_initialized() or dist.get_rank() == 0:
        _skeleton(model).save_pretrained(directory, state_dict=tensors)
    if dist.is_initialized():
        dist.barrier()


@torch.no_grad()
def original_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole parameters and persistent buffers of `model` on the host, in the layout of its original modules.

    Every rank calls it; only the main rank gets the tensors, the others an empty dict. A tensor that has two names
    (tied weights) is one tensor under both.
    """
    pipeline = pipeline_of(model)
    keeps = not dist.is_initialized() or dist.get_rank() == 0 or (pipeline is not None and pipeline.is_stage_main)
    tensors: dict[str, torch.Tensor] = {}
    gathered: dict[int, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in gathered:
            gathered[id(tensor)] = whole(tensor).cpu() if keeps else _take_part(tensor)
        tensors[name] = gathered[id(tensor)]
    if not keeps:
        return {}
    for dot, transforms in _transformed(model, ""):
        own = {name: tensors.pop(dot + name) for name in names_of(transforms)[1]}
        tensors.update({dot + name: value for name, value in to_original(transforms, own).items()})
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    return tensors if pipeline is None else pipeline.collected(tensors)


def _transformed(module: nn.Module, dot: str) -> Iterator[tuple[str, tuple[WeightTransform, ...]]]:
    """The outermost modules with weight transforms: theirs speak for all that is inside."""
    transforms = transforms_of(module)
    if transforms:
        yield dot, transforms
        return
    for name, child in module.named_children():
        yield from _transformed(child, f"{dot}{name}.")


def _take_part(tensor: torch.Tensor) -> torch.Tensor:
    whole(tensor)
    return torch.empty(0)


def _skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """The class and configuration that the model was made from, on the meta device."""
    plain = next(
        one for one in type(model).__mro__ if issubclass(one, PreTrainedModel) and not issubclass(one, FSDPModule)
    )
    with torch.device("meta"):
        skeleton: PreTrainedModel = plain._from_config(copy.deepcopy(model.config), dtype=model.dtype)
    skeleton.generation_config = model.generation_config
    return skeleton
