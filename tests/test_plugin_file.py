from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import on_path, write_module
from tests.plugin_fakes import HEADER, load, refuse


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "site"
    path.mkdir()
    with on_path(path):
        yield path


def test_a_one_file_plugin_is_relative_to_the_recipe_and_leaves_the_path_alone(site: Path, tmp_path: Path) -> None:
    recipes = tmp_path / "recipes"
    source = HEADER + (
        "from __future__ import annotations\nimport dataclasses\n"
        "@dataclasses.dataclass\nclass State:\n    value: dataclasses.InitVar[int] = 3\n"
        "@hookimpl\ndef build_loss(config):\n    return State.__module__\n"
    )
    source = "from __future__ import annotations\n" + source.replace("from __future__ import annotations\n", "")
    file = write_module(recipes, "my-loss", source)
    before = list(sys.path)
    plugins = load(["my-loss.py"], recipes)
    assert sys.path == before
    assert not list(recipes.glob("__pycache__"))
    module = plugins.hook.build_loss(config="c")
    assert module.startswith("hp_plugin_file_my_loss_")
    assert sys.modules[module].__file__ == str(file)
    [record] = plugins.records
    assert (record.name, record.distribution, record.version) == ("my-loss.py", None, None)
    assert record.source == str(file.resolve())
    assert record.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_changed_file_is_read_anew_at_once(site: Path) -> None:
    for result in (1, 2):
        write_module(site, "one", f"{HEADER}@hookimpl\ndef build_loss(config):\n    return {result}\n")
        assert load(["./one.py"], site).hook.build_loss(config="c") == result


def test_files_of_one_name_in_two_directories_are_two_plugins(site: Path) -> None:
    for directory in ("a", "b"):
        write_module(
            site, f"{directory}.one", f"{HEADER}@hookimpl\ndef on_plan(plan):\n    plan.append('{directory}')\n"
        )
    plan: list[str] = []
    load(["a/one.py", str(site / "b" / "one.py")], site).hook.on_plan(plan=plan)
    assert plan == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("onee.py", "there is no file '{site}/onee.py'; did you mean 'one.py'?"),
        ("nowhere/one.py", "there is no file '{site}/nowhere/one.py'"),
        ("./one", "a one-file plugin is a .py file, and './one' isn't one"),
        ("one", "no plugin is named 'one'; did you mean 'one.py'?"),
        ("broken.py", "{site}/broken.py:3 can't be loaded: ZeroDivisionError: division by zero"),
        ("syntax.py", "{site}/syntax.py:1 can't be loaded: SyntaxError: invalid syntax (syntax.py, line 1)"),
        ("exit.py", "{site}/exit.py:1 can't be loaded: SystemExit: 0"),
    ],
)
def test_a_file_that_is_not_there_or_does_not_load_says_where(site: Path, name: str, expected: str) -> None:
    write_module(site, "one", "")
    write_module(site, "broken", "def f():\n    return 1\nx = f() / 0\n")
    write_module(site, "syntax", "def f(:\n")
    write_module(site, "exit", "raise SystemExit(0)\n")
    before = set(sys.modules)
    assert refuse([name], site) == ["plugins[0]: " + expected.format(site=site.resolve())]
    assert not [one for one in set(sys.modules) - before if one.startswith("hp_plugin_file")]


def test_files_of_one_name_keep_states_of_their_own_wherever_they_lie(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        body = f"@hookimpl\ndef save_state(run):\n    return {{'from': {folder!r}}}\n"
        body += "@hookimpl\ndef load_state(run, state):\n    pass\n"
        (tmp_path / folder / "one.py").write_text(HEADER + body)
    for names in (["a/one.py", "b/one.py"], [str(tmp_path / folder / "one.py") for folder in ("a", "b")]):
        found = load(names, tmp_path).of_each("save_state")
        states = {key: save(run=None)["from"] for key, save in found.items()}
        assert sorted(states.values()) == ["a", "b"]
        # In another order, too.
        again = load(names[::-1], tmp_path).of_each("save_state")
        assert {key: save(run=None)["from"] for key, save in again.items()} == states
