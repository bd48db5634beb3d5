from typing import Any

import pytest

from hp_core import InputError, Target
from hp_core.training.defaults import require_taken


def plain(*, distributed_setup: Any) -> None: ...


def with_some(*, activation_checkpoint: Any = None, compile_config: Any = None) -> None: ...


def open_to_all(**features: Any) -> None: ...


def target(function: Any) -> Target:
    return Target("model", "hp.models", import_path=f"{__name__}.{function.__name__}")


def test_a_model_must_take_what_the_recipe_asks_for() -> None:
    asked = {"peft_config": 1, "activation_checkpoint": 2, "activation_swap": None, "compile_config": 3}
    with pytest.raises(InputError) as caught:
        require_taken(target(plain), asked)
    assert [one.path for one in caught.value.problems] == ["peft", "activation_checkpoint", "compile"]
    assert "hand it to hp_core.finish_model" in caught.value.problems[0].hint
    with pytest.raises(InputError) as caught:
        require_taken(target(with_some), asked)
    assert [one.path for one in caught.value.problems] == ["peft"]


def test_what_is_not_asked_for_needs_no_argument() -> None:
    require_taken(target(plain), dict.fromkeys(("peft_config", "compile_config")))
    require_taken(target(open_to_all), {"peft_config": 1})
