from pathlib import Path

import pytest

from hp_core import InputError, load_recipe
from hp_core.testing import TINY_RECIPE

ON = "--compile.mode=default"


def problems(tmp_path: Path, *overrides: str) -> list[tuple[str, str, str]]:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(TINY_RECIPE)
    with pytest.raises(InputError) as caught:
        load_recipe(recipe, overrides)
    return [(one.path, one.message, one.hint) for one in caught.value.problems]


def test_every_key_without_effect_is_told_at_once(tmp_path: Path) -> None:
    written = {"backend": "aot_eager", "modules": "['*.mlp']", "dynamic": "true", "on_failure": "eager"}
    found = problems(tmp_path, *(f"--compile.{key}={value}" for key, value in written.items()))
    assert found == [
        (f"compile.{key}", "has no effect with mode off", f"write mode: default, or remove '{key}'") for key in written
    ]


@pytest.mark.parametrize(
    ("overrides", "path", "message"),
    [
        (("--compile.mode=max-autotune", "--compile.backend=aot_eager"), "compile.mode", "only inductor has it"),
        (("--compile.mode=reduce-overhead", "--training.device=cpu"), "compile.mode", "reduce-overhead records"),
        (("--compile.mode=max-autotune", "--training.device=cpu"), "compile.mode", "max-autotune records CUDA graphs"),
        (
            ("--compile.mode=reduce-overhead", "--activation_swap.mode=host"),
            "activation_swap.mode",
            "moves what is kept for the backward pass",
        ),
        (
            (ON, "--accelerator.ep_size=2", "--activation_checkpoint.mode=selective"),
            "activation_checkpoint.mode",
            "selective keeps results of single operators",
        ),
    ],
)
def test_what_can_not_be_combined_is_told_at_its_place(
    tmp_path: Path, overrides: tuple[str, ...], path: str, message: str
) -> None:
    ((found, told, _),) = problems(tmp_path, *overrides)
    assert found == path
    assert told.startswith(message)


def test_it_is_off_by_default_and_handed_to_models_where_it_is_on(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(TINY_RECIPE)
    assert load_recipe(recipe).config.model_features()["compile_config"] is None
    config = load_recipe(recipe, [ON]).config
    assert config.model_features()["compile_config"] is config.compile
