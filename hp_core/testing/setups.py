"""Process groups and meshes without a recipe, for checks and tests that build a model directly."""

from __future__ import annotations

from hp_core.parallel.tiny import tiny_setup

__all__ = ["tiny_setup"]
