"""The hooks are an interface: documented word for word, and each one called."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hp_core import hookspecs
from hp_core.hooks import Hook, hook_manual, hooks
from hp_core.plugin_check import check_plugin
from hp_core.plugins import load_plugins
from tests.fakes import REPOSITORY, write_module

MANUAL = REPOSITORY / "docs" / "writing-a-plugin.md"

# A plugin that has one of these has both.
STATE = ("save_state", "load_state")

each_hook = pytest.mark.parametrize("hook", hooks().values(), ids=lambda hook: hook.name)


def section(doc: str, name: str) -> str:
    """Return the indented text under `name:`."""
    lines = doc.splitlines()
    start = lines.index(f"{name}:") + 1
    body = [line for line in lines[start:] if line.strip()]
    length = next((index for index, line in enumerate(body) if not line.startswith(" ")), len(body))
    return inspect.cleandoc("\n" + "\n".join(body[:length]))


@each_hook
def test_the_docstring_says_when_where_and_what(hook: Hook) -> None:
    paragraphs = hook.doc.split("\n\n")
    assert paragraphs[0].endswith(".")
    assert len(paragraphs[0].splitlines()) == 1
    assert paragraphs[1].startswith("When: ")
    assert "\nRanks: " in paragraphs[1]
    arguments = [line for line in section(hook.doc, "Args").splitlines() if not line.startswith(" ")]
    assert tuple(line.split(": ")[0] for line in arguments) == hook.arguments
    assert all(len(line.split(": ", 1)[1]) > 5 for line in arguments)
    expected = "None passes the work on; core then" if hook.firstresult else "Nothing; a value is ignored."
    if hook.name == "save_state":
        expected = "None if there is nothing to find again."
    assert expected in " ".join(section(hook.doc, "Returns").split())


@each_hook
def test_the_example_is_a_valid_implementation_of_the_hook(hook: Hook) -> None:
    example = hook.doc.split("\nExample:\n")[1]
    source = inspect.cleandoc(example)
    assert 3 <= len(source.splitlines()) <= 10
    names = list(STATE) if hook.name in STATE else [hook.name]
    written = ast.parse(source).body
    assert [one.name for one in written if isinstance(one, ast.FunctionDef)] == names
    assert len(written) == len(names)
    module = ModuleType("example")
    exec(f"from hp_core.hookspecs import hookimpl\n{source}", module.__dict__)
    functions, problems = check_plugin(module)
    assert problems == ()
    assert sorted(one.hook.name for one in functions) == sorted(names)


@each_hook
def test_the_documentation_has_the_exact_signature(hook: Hook) -> None:
    text = MANUAL.read_text(encoding="utf-8")
    parameters = ", ".join(inspect.signature(getattr(hookspecs, hook.name)).parameters)
    assert text.count(f"\n### `{hook.name}({parameters})`\n") == 1


def test_the_documentation_is_what_the_command_prints() -> None:
    text = MANUAL.read_text(encoding="utf-8")
    start = text.index("<!-- hooks: ")
    reference = text[text.index("-->", start) + 3 : text.index("<!-- end of hooks -->")]
    assert reference.strip() == hook_manual().strip(), "paste the output of `hp-train plugins --hooks`"


@each_hook
def test_the_hook_is_called_with_every_argument_by_name(hook: Hook, tmp_path: Path) -> None:
    source = "from hp_core.hookspecs import hookimpl\ncalls = []\n@hookimpl\n"
    source += f"def {hook.name}({', '.join(reversed(hook.arguments))}):\n"
    source += "    calls.append(dict(locals()))\n    return calls\n"
    others = [name for name in STATE if hook.name in STATE and name != hook.name]
    source += "".join(f"@hookimpl\ndef {name}(run):\n    pass\n" for name in others)
    write_module(tmp_path, "recorder", source)
    plugins = load_plugins(["recorder.py"], base_dir=tmp_path)
    arguments: dict[str, Any] = {name: object() for name in hook.arguments}
    result = getattr(plugins.hook, hook.name)(**arguments)
    [calls] = [result] if hook.firstresult else result
    assert calls == [arguments]
    assert set(plugins.records[0].hooks) == {hook.name, *others}
