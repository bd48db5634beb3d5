"""Weights of a Hugging Face directory into a model that is already sharded: each rank reads only its own part."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter
from transformers.modeling_utils import LoadStateDictConfig

from hp_core.errors import ArgumentError
from hp_core.parallel.pipeline.stages import elsewhere

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_stored_dtypes: WeakKeyDictionary[PreTrainedModel, torch.dtype] = WeakKeyDictionary()


def stored_dtype(model: PreTrainedModel) -> torch.dtype | None:
    """The dtype of the files that the model was loaded from, whatever it is trained in; None where nothing was."""
    return _stored_dtypes.get(model)


def weight_files(pretrained: str, revision: str | None) -> list[str]:
    """The safetensors files of a directory, or of a hub id (fetched once a host by the hub's own cache).

    Raises:
        ArgumentError: there are none; other formats are refused because reading them runs code.
    """
    folder = Path(pretrained).expanduser()
    if not folder.is_dir():
        folder = _fetch(pretrained, revision)
    files = sorted(str(path) for path in folder.glob("*.safetensors"))
    if not files:
        raise ArgumentError(
            "pretrained", f"no *.safetensors file in {str(folder)!r}", "save the model with safe_serialization"
        )
    return files


def load_weights(model: PreTrainedModel, files: list[str], *, dtype: torch.dtype) -> None:
    """Fill a meta `model`, sharded or not, from `files`, converting the layout on disk to the model's own.

    transformers reads slices of the files by the placements of the DTensors in the model, so no rank ever holds a
    whole tensor it owns a part of. Buffers that no checkpoint holds are recomputed.

    Raises:
        ArgumentError: the files lack a parameter, or hold one of another shape, or one the model has no place for.
    """
    config = LoadStateDictConfig(
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=_conversions(model),
    )
    if (stored := _dtype_of(files)) is not None:
        _stored_dtypes[model] = stored
    # Without it transformers takes the DTensors for its own tensor parallelism and gathers them again.
    model._is_distributed_loading_by_transformers = True
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    trainable = {name: one.requires_grad for name, one in model.named_parameters(remove_duplicate=False)}
    info, _ = type(model)._load_pretrained_model(model, None, files, config)
    problems = [f"{key} is missing" for key in sorted(_untied(model, info.missing_keys))]
    problems += [f"{key[0]} has another shape" for key in sorted(info.mismatched_keys)]
    problems += [f"{key}: {error}" for key, error in sorted(info.conversion_errors.items())]
    if problems:
        raise ArgumentError("pretrained", "the weight files don't fit the model: " + _some(problems))
    info = type(model)._finalize_model_loading(model, config, info)
    # transformers puts new parameters in place of those that were frozen.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(trainable[name])
    others = tuple(f"{fqn}." for fqn in elsewhere(model))
    keys = sorted(key for key in info.unexpected_keys if not key.startswith(others))
    if keys:
        unexpected = [f"{key} has no place in the model" for key in keys]
        raise ArgumentError("pretrained", "the weight files don't fit the model: " + _some(unexpected))


def _conversions(model: PreTrainedModel) -> list[Any]:
    """How transformers makes the model's tensors of those on disk, with the shapes of shards where it compares any."""
    mapping: list[Any] = get_model_conversion_mapping(model, None, None)
    for one in mapping:
        if isinstance(one, WeightConverter):
            one.operations = [
                _TransposeOfShard(step.dim0, step.dim1) if isinstance(step, Transpose) and step.check_dims else step
                for step in one.operations
            ]
    return mapping


class _TransposeOfShard(Transpose):
    """Transposes what has not the shape of this rank's part; transformers compares it with the whole parameter's."""

    @torch.no_grad()
    def convert(  # type: ignore[override]  # transformers types it as no_grad itself
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        parameter = kwargs["model"].get_parameter(kwargs["full_layer_name"])
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        target = self.get_target_pattern(input_dict, source_patterns, target_patterns)
        found = next(iter(input_dict.values()))
        tensor: torch.Tensor = found[0] if isinstance(found, list) else found
        if tensor.shape != own.shape:
            tensor = tensor.transpose(self.dim0, self.dim1).contiguous()
        return {target: tensor}


def _dtype_of(files: list[str]) -> torch.dtype | None:
    """The dtype of most tensors in the first file; norms and routers may have another."""
    counts: Counter[str] = Counter()
    with safe_open(files[0], framework="pt") as file:
        counts.update(file.get_slice(name).get_dtype() for name in file.keys())  # noqa: SIM118 (it is no mapping)
    known = [one for one, _ in counts.most_common() if one in _DTYPES]
    return _DTYPES[known[0]] if known else None


def _untied(model: PreTrainedModel, missing: set[str]) -> set[str]:
    return missing - set(model.all_tied_weights_keys)


def _some(problems: list[str], limit: int = 5) -> str:
    rest = f" (and {len(problems) - limit} more)" if len(problems) > limit else ""
    return "; ".join(problems[:limit]) + rest


def _fetch(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(
            snapshot_download(hub_id, revision=revision, allow_patterns=["*.safetensors", "*.safetensors.index.json"])
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, ValueError) as error:
        raise ArgumentError("pretrained", f"{hub_id!r} is no directory and can't be fetched: {error}") from error
