"""The conformance kit: one decorator a component, one pytest test a promise, and helpers for tests of plugins."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_core.testing.losses import loss_checks
    from hp_core.testing.optimizers import optimizer_checks
    from hp_core.testing.replacements import replacement_checks

# Imported when first used: the pytest plugin of this package is loaded in every test run, also one without torch.
_LAZY = {
    "loss_checks": "hp_core.testing.losses",
    "optimizer_checks": "hp_core.testing.optimizers",
    "replacement_checks": "hp_core.testing.replacements",
}

__all__ = ["loss_checks", "optimizer_checks", "replacement_checks"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'hp_core.testing' has no attribute {name!r}")
    return vars(import_module(_LAZY[name]))[name]
