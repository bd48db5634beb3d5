"""Recipe text to a frozen, located `TrainerConfig`."""

from __future__ import annotations

from hp_core.config.loader import Recipe, load_recipe
from hp_core.config.models import TrainerConfig
from hp_core.config.nested import ComponentOf
from hp_core.config.target import Target

__all__ = ["ComponentOf", "Recipe", "Target", "TrainerConfig", "load_recipe"]
