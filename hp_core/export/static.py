"""What a recipe alone says of the export of its model, without building anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hp_core.config import TrainerConfig
from hp_core.errors import ArgumentError, InputError
from hp_core.export.assets import GENERATION_HINT, REFUSED, REMOTE_CODE
from hp_core.model.generation import generation_config, refusal


def export_remarks(config: TrainerConfig) -> list[str]:
    """Check what is known of the model before it is built; returns what to tell the user.

    Raises:
        InputError: transformers would refuse to save the generation configuration.
    """
    model = config.model
    pretrained, values = model.arguments.get("pretrained"), model.arguments.get("generation_config")
    folder = Path(pretrained).expanduser() if isinstance(pretrained, str) else None
    # The hub is not asked.
    local = str(folder) if folder is not None and folder.is_dir() else None
    try:
        found = generation_config(local, None, values if isinstance(values, Mapping) else {})
    except ArgumentError as error:
        raise InputError(model.problem(error.path, error.message, error.hint)) from error
    reason = None if found is None else refusal(found)
    if reason is not None:
        path = "generation_config" if values else "pretrained"
        raise InputError(model.problem(path, f"{REFUSED}: {reason}", GENERATION_HINT))
    if model.arguments.get("trust_remote_code") is True and local is not None and REMOTE_CODE in _stored(Path(local)):
        return [f"the trained model can't be exported: its code is that of {local}, not of transformers"]
    return []


def _stored(folder: Path) -> dict[str, Any]:
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # building the model tells
    return values if isinstance(values, dict) else {}
