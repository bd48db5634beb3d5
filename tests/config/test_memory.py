from pathlib import Path

import pytest

from hp_core import InputError, load_recipe
from hp_core.testing import TINY_RECIPE

SELECTIVE = "--activation_checkpoint.mode=selective"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("--accelerator.cp_size=2", "--accelerator.cp_method=ring"), "cp_method ring changes the scores"),
        (("--accelerator.pp_size=2", "--accelerator.pp_schedule=zbv_zero_bubble"), "pp_schedule zbv_zero_bubble goes"),
    ],
)
def test_what_selective_can_not_be_combined_with_is_told_at_its_place(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(TINY_RECIPE)
    with pytest.raises(InputError) as caught:
        load_recipe(recipe, [SELECTIVE, *overrides])
    (problem,) = caught.value.problems
    assert (problem.path, problem.hint) == ("activation_checkpoint.mode", "write mode: full")
    assert problem.message.startswith(message)
    assert load_recipe(recipe, ["--activation_checkpoint.mode=full", *overrides])


def test_modules_to_swap_without_swapping_are_told_at_their_place(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(TINY_RECIPE)
    with pytest.raises(InputError) as caught:
        load_recipe(recipe, ["--activation_swap.modules=[model.layers.0]"])
    (problem,) = caught.value.problems
    assert (problem.path, problem.message) == ("activation_swap.modules", "has no effect with mode off")
    assert load_recipe(recipe, ["--activation_swap.mode=host"]).config.model_features()["activation_swap"] is not None
    assert load_recipe(recipe).config.model_features()["activation_swap"] is None
