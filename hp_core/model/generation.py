"""How a model's texts are to be generated: its `generation_config.json`, which an export hands on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from hp_core.errors import ArgumentError
from hp_core.spelling import did_you_mean

FILE = "generation_config.json"


def generation_config(
    pretrained: str | None, revision: str | None, values: Mapping[str, Any], model: PreTrainedConfig | None = None
) -> GenerationConfig | None:
    """That of `pretrained`, or one made from the configuration `model`, with `values` on top.

    None where there is neither a file nor a value, and the model's class decides.

    Raises:
        ArgumentError: an unknown key, or a file that can't be read.
    """
    known = set(vars(GenerationConfig()))
    for key in values:
        if key not in known or key.startswith("_"):
            guess = did_you_mean(key, sorted(known))
            raise ArgumentError(f"generation_config.{key}", "transformers has no such generation setting", guess)
    stored = None if pretrained is None else _stored(pretrained, revision)
    if not values:
        return stored
    config = stored or (GenerationConfig() if model is None else GenerationConfig.from_model_config(model))
    config._from_model_config = False
    config.update(**values)
    return config


def refusal(config: GenerationConfig) -> str | None:
    """Why transformers would refuse to save it, in its own words; None when it wouldn't."""
    changed = getattr(config, "_original_object_hash", None) != hash(config)
    try:
        # What `save_pretrained` does first: what was loaded and not changed is saved as it was.
        config.validate(strict=changed)
    except ValueError as error:
        # Behind this it says where such values may come from.
        reason = " ".join(str(error).split()).partition(" If you're using")[0]
        return reason.removeprefix("GenerationConfig is invalid: - ")
    return None


def _stored(pretrained: str, revision: str | None) -> GenerationConfig | None:
    folder = Path(pretrained).expanduser()
    if folder.is_dir() and not (folder / FILE).is_file():
        return None
    try:
        config: GenerationConfig = GenerationConfig.from_pretrained(
            str(folder) if folder.is_dir() else pretrained, revision=revision or "main"
        )
    except (OSError, ValueError) as error:
        if folder.is_dir():
            message = f"can't read {str(folder / FILE)!r}: {' '.join(str(error).split())}"
            raise ArgumentError("pretrained", message) from error
        return None  # many repositories have none
    return config
