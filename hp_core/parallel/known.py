"""What a recipe's model is known to be before anything of it is built, and without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hp_core.config.target import Target


def known_config(model: Target) -> Mapping[str, Any]:
    """The values of the model's configuration that the recipe writes, over those of its own directory.

    Empty where neither says anything. The hub is not asked, and a file that can't be read is told by building.
    """
    written = model.arguments.get("config")
    stored = _stored(model.arguments.get("pretrained"))
    return {**stored, **written} if isinstance(written, Mapping) else stored


def full_config(model: Target) -> Mapping[str, Any] | None:
    """`known_config` with the values of the model's class where nothing else is said; None if it isn't known.

    It imports transformers.
    """
    from transformers import AutoConfig

    values = dict(known_config(model))
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str):
        return None
    try:
        found: dict[str, Any] = AutoConfig.for_model(model_type, **values).to_dict()
    except Exception:
        return None  # building the model tells what is wrong
    return found


def _stored(pretrained: Any) -> Mapping[str, Any]:
    path = Path(pretrained).expanduser() / "config.json" if isinstance(pretrained, str) else None
    if path is None or not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, Mapping) else {}
