from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hp_core.errors import InputError, RunError
from hp_core.hookspecs import hookimpl
from hp_core.plugin_guard import PluginError
from tests.fakes import on_path
from tests.plugin_fakes import Defaults, load, plugin


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "site"
    path.mkdir()
    with on_path(path):
        yield path


def test_an_exception_names_the_plugin_and_keeps_the_cause(site: Path) -> None:
    plugin(site, "bad", "@hookimpl\ndef build_loss(config):\n    raise ValueError(f'no {config}')\n", number="1.2")
    with pytest.raises(PluginError) as error:
        load(["bad"], site, defaults=[Defaults()]).hook.build_loss(config="head")
    assert str(error.value) == "plugin 'bad' (bad-dist 1.2): build_loss raised ValueError: no head"
    assert isinstance(error.value.__cause__, ValueError)
    assert isinstance(error.value, RunError)


def test_a_plugin_cannot_end_the_run_quietly(site: Path) -> None:
    plugin(site, "bad", "import sys\n@hookimpl\ndef on_plan(plan):\n    sys.exit(0)\n")
    with pytest.raises(PluginError, match=r"on_plan raised SystemExit: 0$"):
        load(["bad"], site).hook.on_plan(plan=1)


def test_an_hp_error_and_an_interrupt_pass_unchanged(site: Path) -> None:
    source = "from hp_core.errors import InputError\n@hookimpl\ndef on_plan(plan):\n    raise InputError('too big')\n"
    plugin(site, "strict", source + "@hookimpl\ndef on_train_start(run):\n    raise KeyboardInterrupt\n")
    hook = load(["strict"], site).hook
    with pytest.raises(InputError, match=r"^too big$"):
        hook.on_plan(plan=1)
    with pytest.raises(KeyboardInterrupt):
        hook.on_train_start(run=1)


WRAPPER = "@hookimpl(wrapper=True)\ndef build_loss(config):\n"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("    raise ValueError(1)\n    yield\n", "build_loss raised ValueError: 1"),
        ("    yield\n    raise ValueError(2)\n", "build_loss raised ValueError: 2"),
        ("    yield\n    yield\n", "build_loss yielded more than once"),
        ("    if config:\n        return 1\n    yield\n", "build_loss returned without a yield"),
        ("    yield\n", "build_loss returned None instead of the result that it got from yield"),
    ],
)
def test_a_wrapper_that_fails_or_drops_the_result_is_named(site: Path, body: str, text: str) -> None:
    plugin(site, "w", WRAPPER + body)
    with pytest.raises(PluginError) as error:
        load(["w"], site, defaults=[Defaults()]).hook.build_loss(config="c")
    assert str(error.value) == f"plugin 'w' (w-dist 1.0): {text}"


class Failing:
    @hookimpl
    def build_loss(self, config: Any) -> Any:
        raise OSError(config)


def test_what_fails_inside_a_wrapper_is_not_blamed_on_it(site: Path) -> None:
    plugin(site, "w", WRAPPER + "    try:\n        return (yield)\n    finally:\n        config.append('cleaned up')\n")
    plugin(site, "bad", "@hookimpl\ndef build_loss(config):\n    return 1 / 0\n")
    config: list[str] = []
    with pytest.raises(OSError, match="cleaned up"):
        load(["w"], site, defaults=[Failing()]).hook.build_loss(config=config)
    with pytest.raises(PluginError, match=r"^plugin 'bad' .*ZeroDivisionError"):
        load(["w", "bad"], site).hook.build_loss(config=config)
    assert config == ["cleaned up"] * 2


def test_a_wrapper_may_rescue_or_translate_a_failure(site: Path) -> None:
    rescue = WRAPPER + "    try:\n        return (yield)\n    except OSError as error:\n        "
    plugin(site, "rescue", rescue + "return 'rescued'\n")
    plugin(site, "translate", rescue + "raise ValueError('translated') from error\n")
    assert load(["rescue"], site, defaults=[Failing()]).hook.build_loss(config="c") == "rescued"
    with pytest.raises(PluginError, match=r"^plugin 'translate' .*ValueError: translated$"):
        load(["translate"], site, defaults=[Failing()]).hook.build_loss(config="c")


def test_a_decorated_function_and_the_value_none_for_observers_are_fine(site: Path) -> None:
    source = """
import functools
def logged(function):
    @functools.wraps(function)
    def inner(*args): return function(*args)
    return inner
@hookimpl
@logged
def on_step_end(step, run): run.append(step)
@hookimpl(wrapper=True)
@logged
def on_plan(plan):
    plan.append("before")
    yield
    plan.append("after")
"""
    plugin(site, "good", source)
    hook = load(["good"], site).hook
    seen: list[Any] = []
    hook.on_step_end(run=seen, step=7)
    hook.on_plan(plan=seen)
    assert seen == [7, "before", "after"]


@pytest.mark.parametrize("arguments", [{}, {"config": 1, "model": 2}, {"confg": 1}])
@pytest.mark.filterwarnings("ignore:Argument.* which are declared in the hookspec:UserWarning")
def test_a_call_with_other_arguments_is_an_error(site: Path, arguments: dict[str, int]) -> None:
    plugin(site, "good", "@hookimpl\ndef build_loss():\n    return 1\n")
    with pytest.raises(TypeError, match=r"the hook build_loss\(config\) was called with \("):
        load(["good"], site).hook.build_loss(**arguments)
