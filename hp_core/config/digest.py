"""What recipes are compared by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hp_core.config.models import TrainerConfig
from hp_core.config.target import Target

# Where a recipe is from, where this machine writes, and how it starts processes: no other's business.
_OWN = frozenset({"base", "output_dir", "launch"})


def digests(config: TrainerConfig) -> Mapping[str, str]:
    """A hash of what each key of a recipe says, for comparing; what comes from the environment is not to be told."""
    said = {name: getattr(config, name) for name in type(config).model_fields if name not in _OWN}
    # Where a one-file plugin lies is a machine's own business; its content is compared when it is loaded.
    said["plugins"] = [Path(name).name if name.endswith(".py") else name for name in config.plugins]
    values = [("launch.timeout", config.launch.timeout), *_keys("", said)]
    return {key: hashlib.sha256(repr(value).encode()).hexdigest() for key, value in values}


def _keys(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Each single value with its key; of a section or list its size too, as an empty one has no others."""
    if isinstance(value, Target):
        # As the recipe writes it; some sections hold their component under a name of ours.
        path = value.section
        yield path, value.spelling
        inner: Mapping[str, Any] = value.arguments
    elif isinstance(value, BaseModel):
        inner = {name: getattr(value, name) for name in type(value).model_fields}
    elif isinstance(value, Mapping):
        inner = value
        yield path, ("mapping", len(value))
    elif isinstance(value, (list, tuple)):
        yield path, ("list", len(value))
        for number, one in enumerate(value):
            yield from _keys(f"{path}[{number}]", one)
        return
    else:
        yield path, value
        return
    for key, one in inner.items():
        yield from _keys(f"{path}.{key}" if path else str(key), one)
