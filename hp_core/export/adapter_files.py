"""Adapters alone, without the model that they are for, as `peft` loads them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from hp_core.errors import InputError, Problem
from hp_core.export.adapter import WRAPPER, Adapters
from hp_core.export.reading import StoredModel

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


def require_alone(adapters: Adapters, skeleton: PreTrainedModel) -> None:
    """Refuse adapters that `peft` would not put back where they were.

    Args:
        adapters: those of the run.
        skeleton: the plain model, on the meta device; it is of no use afterwards.

    Raises:
        InputError: there are none, or several at once, or plain transformers has other layers.
    """
    hint = "leave out --adapter, and the adapters are merged into the model"
    if not adapters.config:
        found = "its adapters are several" if adapters.names else "it has no adapters"
        raise InputError(Problem(f"--adapter: {found}", hint="leave out --adapter"))
    try:
        from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    except ImportError as error:
        raise InputError(
            Problem("--adapter: peft is not installed", hint="pip install 'hyperparallel[peft]'")
        ) from error
    config = LoraConfig.from_peft_type(**{**adapters.config, "base_model_name_or_path": None})
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            made = get_peft_model(skeleton, config)
            names = set(get_peft_model_state_dict(made, save_embedding_layers=False))
    except ValueError as error:
        raise InputError(Problem(f"--adapter: peft can't put them into the plain model: {error}", hint=hint)) from error
    if other := sorted(names ^ {WRAPPER + name for name in adapters.alone}):
        message = f"--adapter: peft would put them into other layers of the plain model: {other[0]!r}"
        raise InputError(Problem(message, hint=hint))


def outputs_of(adapters: Adapters, stored: StoredModel, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The tensors of the file, on the meta device."""
    return {
        WRAPPER + name: torch.empty_like(stored.tensors[source], dtype=dtype)
        for name, source in sorted(adapters.alone.items())
    }


def write_adapter(directory: Path, adapters: Adapters, stored: StoredModel, dtype: torch.dtype | None) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json`, in the types that the run keeps unless told."""
    names: Sequence[str] = sorted(adapters.alone)
    found = stored.read([adapters.alone[name] for name in names])
    tensors = {WRAPPER + name: found[adapters.alone[name]].to(dtype=dtype).contiguous() for name in names}
    path = directory / _WEIGHTS
    save_file(tensors, path, metadata={"format": "pt"})
    # The library lets nobody but the owner read.
    path.chmod(directory.stat().st_mode & 0o666)
    (directory / _CONFIG).write_text(json.dumps(adapters.config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
