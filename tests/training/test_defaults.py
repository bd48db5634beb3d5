from typing import Any

from hp_core import InputError, Target
from hp_core.training.defaults import require_taken


def plain(*, distributed_setup: Any) -> None: ...


def with_some(*, activation_checkpoint: Any = None, compile_config: Any = None) -> None: ...


def open_to_all(**features: Any) -> None: ...


def target(function: Any) -> Target:
    return Target("model", "hp.models", import_path=f"{__name__}.{function.__name__}")


def refused(function: Any, asked: dict[str, Any]) -> list[tuple[str, str]]:
    """The paths and hints of what is refused."""
    try:
        require_taken(target(function), asked)
    except InputError as error:
        return [(one.path, one.hint) for one in error.problems]
    return []


def test_a_model_must_take_what_the_recipe_asks_for() -> None:
    asked = {"peft_config": 1, "activation_checkpoint": 2, "activation_swap": None, "compile_config": 3}
    found = refused(plain, asked)
    assert [path for path, _ in found] == ["peft", "activation_checkpoint", "compile"]
    assert all("hand it to hp_core.finish_model" in hint for _, hint in found)
    assert [path for path, _ in refused(with_some, asked)] == ["peft"]
    assert refused(open_to_all, asked) == []


def test_what_is_not_asked_for_needs_no_argument() -> None:
    assert refused(plain, dict.fromkeys(("peft_config", "compile_config"))) == []
