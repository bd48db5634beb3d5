"""What recipes are compared by."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from hp_core.config.models import TrainerConfig

# Where a recipe is from, where this machine writes, and how it starts processes: no other's business.
_OWN = frozenset({"base", "output_dir", "launch"})


def digests(config: TrainerConfig) -> Mapping[str, str]:
    """A hash of what each section of a recipe says, for comparing; where values come from the environment too."""
    found: dict[str, list[str]] = {"launch.timeout": [str(config.launch.timeout)]}
    for target in config.targets():
        section = target.section.partition(".")[0].partition("[")[0]
        said = (target.section, target.spelling, sorted(target.arguments.items()))
        found.setdefault(section, []).append(repr(said))
    # Where a one-file plugin lies is a machine's own business; its content is compared when it is loaded.
    found["plugins"] = [Path(name).name if name.endswith(".py") else name for name in config.plugins]
    for name in type(config).model_fields:
        if name not in _OWN and name != "plugins":
            found.setdefault(name, []).append(str(getattr(config, name)))
    return {name: hashlib.sha256(repr(said).encode()).hexdigest() for name, said in found.items()}
