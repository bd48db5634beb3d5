from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hp_core import InputError, load_recipe
from hp_core.cli.checked import checked_recipe
from hp_core.config.peft import PeftConfig
from hp_core.testing import TINY_RECIPE
from tests.e2e.runs import hp_train_here


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(TINY_RECIPE)
    return path


@pytest.mark.parametrize(
    ("override", "path", "message"),
    [
        ("--peft.method=loar", "peft.method", "did you mean 'lora'?"),
        ("--peft.r=0", "peft.r", "at least 1"),
        ("--peft.lora_alpha=0", "peft.lora_alpha", "at least 1"),
        ("--peft.lora_alpha=0.5", "peft.lora_alpha", "integer"),
        ("--peft.lora_dropout=1", "peft.lora_dropout", "must be less than 1"),
        ("--peft.target_modules=[]", "peft.target_modules", "must not be empty"),
        ("--peft.init_lora_weights=pissa", "peft.init_lora_weights", "gaussian"),
        ("--peft.rank=4", "peft.rank", "unknown key"),
        ("--peft.load_in_4bit=true", "peft.load_in_4bit", "not supported by version"),
    ],
)
def test_wrong_values_are_told_at_their_place(recipe: Path, override: str, path: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_recipe(recipe, ["--peft={method: lora}", override])
    (problem,) = caught.value.problems
    assert problem.path == path
    assert message in f"{problem.message}; {problem.hint}"


def test_every_key_without_a_method_has_no_effect_and_is_refused(recipe: Path) -> None:
    changed = {
        "r": 4,
        "lora_alpha": 32,
        "lora_dropout": 0.1,
        "target_modules": "q_proj",
        "exclude_modules": "q_proj",
        "modules_to_save": "lm_head",
        "use_rslora": "true",
        "use_dora": "true",
        "init_lora_weights": "gaussian",
        "autocast_adapter_dtype": "false",
    }
    assert set(changed) == set(PeftConfig.model_fields) - {"method"}
    with pytest.raises(InputError) as caught:
        load_recipe(recipe, [f"--peft.{key}={value}" for key, value in changed.items()])
    assert {one.path for one in caught.value.problems} == {f"peft.{key}" for key in changed}
    assert all("no effect with method none" in one.message for one in caught.value.problems)


def test_a_recipe_without_the_library_is_refused_with_the_command(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "peft" else find(name, *args))
    done = hp_train_here("check", str(recipe), "--peft.method=lora")
    assert done.returncode == 2
    assert "peft.method: the library peft is not installed" in done.stderr
    assert "pip install 'hyperparallel[peft]'" in done.stderr
    assert checked_recipe(str(recipe), ())


def test_without_a_method_a_model_builder_is_asked_for_nothing(recipe: Path) -> None:
    assert load_recipe(recipe).config.model_features()["peft_config"] is None
    asked = load_recipe(recipe, ["--peft={method: lora, r: 4}"]).config.model_features()["peft_config"]
    assert (asked.method, asked.r, asked.target_modules) == ("lora", 4, None)
