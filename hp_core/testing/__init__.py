"""The conformance kit: one decorator a component, one pytest test a promise, and helpers for tests of plugins."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_core.testing.hooks import hook_checks
    from hp_core.testing.losses import loss_checks
    from hp_core.testing.models import FAMILIES, tiny_batch, tiny_config, tiny_model
    from hp_core.testing.optimizers import optimizer_checks
    from hp_core.testing.parts import TINY_RECIPE
    from hp_core.testing.replacements import replacement_checks
    from hp_core.testing.trainers import trainer_checks

# Imported when first used: pytest loads the fixtures of this package in every test run, whatever it tests.
_LAZY = {
    "FAMILIES": "hp_core.testing.models",
    "TINY_RECIPE": "hp_core.testing.parts",
    "hook_checks": "hp_core.testing.hooks",
    "loss_checks": "hp_core.testing.losses",
    "optimizer_checks": "hp_core.testing.optimizers",
    "replacement_checks": "hp_core.testing.replacements",
    "tiny_batch": "hp_core.testing.models",
    "tiny_config": "hp_core.testing.models",
    "tiny_model": "hp_core.testing.models",
    "trainer_checks": "hp_core.testing.trainers",
}

__all__ = [
    "FAMILIES",
    "TINY_RECIPE",
    "hook_checks",
    "loss_checks",
    "optimizer_checks",
    "replacement_checks",
    "tiny_batch",
    "tiny_config",
    "tiny_model",
    "trainer_checks",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'hp_core.testing' has no attribute {name!r}")
    return vars(import_module(_LAZY[name]))[name]


def __dir__() -> list[str]:
    return sorted(__all__)
