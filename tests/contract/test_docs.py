"""What the documentation shows is what the program takes: recipes, commands, links and code."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from hp_core.cli.main import main
from hp_core.config import load_recipe
from hp_core.errors import HpError
from tests.conftest import ROOT

PAGES = sorted(path for path in (*ROOT.glob("docs/*.md"), ROOT / "README.md") if path.is_file())
REQUIRED = {"model", "dataset", "optimizer", "training"}
FENCE = re.compile(r"^```([\w-]*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def names(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


each_page = pytest.mark.parametrize("page", PAGES, ids=names)


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in one of the languages."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [text for language, text in found if language in languages]


def recipes(page: Path) -> Iterator[str]:
    for text in blocks(page, "yaml"):
        data = YAML(typ="safe", pure=True).load(text)
        if text.startswith("# recipe: ") or set(data) >= REQUIRED:
            yield text


def commands(text: str) -> Iterator[list[str]]:
    """The `hp-train` commands of a block, as arguments; lines that only print are left out."""
    lines = text.replace("\\\n", " ").splitlines()
    is_session = any(line.startswith("$ ") for line in lines)
    for line in lines:
        line = line.removeprefix("$ ") if line.startswith("$ ") or not is_session else ""
        for part in re.split(r"&&|;| [|>] ", line.split(" # ")[0]):
            words = shlex.split(part) if "hp-train" in part else []
            if words and Path(words[0]).name == "hp-train":
                yield words[1:]


def all_commands() -> list[Any]:
    found = [
        pytest.param(arguments, id=f"{page.name}: {' '.join(arguments)[:60]}")
        for page in PAGES
        for text in blocks(page, "console", "sh", "bash", "text")
        for arguments in commands(text)
    ]
    assert len(found) >= 10
    return found


def test_a_block_is_read_as_a_shell_would() -> None:
    text = (
        "$ hp-train a.yaml \\\n  --nproc 2 # two\nhp-train printed this\n$ ls && .venv/bin/hp-train check 'b c.yaml'\n"
    )
    assert list(commands(text)) == [["a.yaml", "--nproc", "2"], ["check", "b c.yaml"]]


def test_there_are_whole_recipes_to_check() -> None:
    assert sum(1 for page in PAGES for _ in recipes(page)) >= 1


@each_page
def test_whole_recipes_are_valid(page: Path, tmp_path: Path) -> None:
    for number, text in enumerate(recipes(page)):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text, encoding="utf-8")
        load_recipe(path)


@each_page
def test_recipes_that_start_from_another_one_are_valid(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with a `base` is checked together with the pages' other named files, unless the page shows it failing."""
    text = page.read_text(encoding="utf-8")
    files = dict(
        re.findall(r"^`([\w./-]+\.\w+)`[^\n]*:\n(?:[^`\n][^\n]*\n)*\n```(?:\w+)\n(.*?)^```$", text, re.M | re.S)
    )
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, content in files.items():
        if content.startswith("base: "):
            printed = re.findall(rf"^({re.escape(name)}:\d+:\d+: .*)$", text, re.M)
            assert problems(tmp_path / name) == printed


def problems(path: Path) -> list[str]:
    try:
        load_recipe(path)
    except HpError as error:
        return [line.removeprefix(f"{path.parent}/") for line in str(error).splitlines()]
    return []


@pytest.mark.parametrize("arguments", all_commands())
def test_commands_and_options_exist(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line is taken apart as `hp-train` does it; what would run then is not run."""
    for name in ("train", "check", "data", "config", "schema", "plugins", "new_plugin", "launch", "export"):
        monkeypatch.setattr(f"hp_core.cli.{name}.run", lambda args: 0)
    if {"-h", "--help", "--version"} & set(arguments):
        with pytest.raises(SystemExit, match=r"^0$"):
            main(arguments)
    else:
        assert main(arguments) == 0


@pytest.mark.parametrize("arguments", all_commands())
def test_recipe_values_on_the_command_line_exist(arguments: list[str], tmp_path: Path) -> None:
    overrides = [argument for argument in arguments if re.match(r"--[a-z_.]*[._][\w.\[\]]*=", argument)]
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: {name: causal_lm, config: {model_type: llama}}\ndataset: {name: python_docs}\n"
        "optimizer: {name: adamw, lr: 1e-3}\ntraining: {train_iters: 1}\n"
    )
    shown_wrong = "unknown key" if any("itres" in override for override in overrides) else None
    if shown_wrong is None:
        load_recipe(path, overrides)
    else:
        with pytest.raises(HpError, match=shown_wrong):
            load_recipe(path, overrides)


@each_page
def test_python_blocks_compile(page: Path) -> None:
    for text in blocks(page, "python"):
        ast.parse(text)


@each_page
def test_links_resolve(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    others = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == others
