"""The recipe reference says what the code does."""

from __future__ import annotations

import pathlib

from hp_core.components import Components
from hp_core.config.reference import reference


def test_recipe_reference_is_up_to_date() -> None:
    path = pathlib.Path(__file__).parents[2] / "docs" / "recipe.md"
    assert path.read_text(encoding="utf-8") == reference(Components.discover()), (
        "run: python -m hp_core.config.reference > docs/recipe.md"
    )
