"""`hp-train new-plugin`: what it refuses, what it writes, and that this works at once."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hp_core.cli.main import main
from hp_core.cli.new_plugin import KINDS, TEMPLATES, import_name
from hp_core.entry_points import installed_version
from hp_core.observe.trackers import read_metrics
from tests.conftest import ROOT
from tests.environments import Environment, shell_commands
from tests.fakes import install, on_path

# As long as a name may be: lines of the templates hold it.
LONG = "acme-plugin-with-a-name-of-forty-letters"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # The command puts the working directory there.
    monkeypatch.setattr(sys, "path", list(sys.path))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    before = sorted(Path.cwd().rglob("*"))
    assert main(["new-plugin", *arguments]) == 2
    assert sorted(Path.cwd().rglob("*")) == before
    out, err = capsys.readouterr()
    assert out == ""
    return err.rstrip("\n")


NO_NAME = "is no name for a package: letters, digits, '-', '_' and '.', with a letter or digit at both ends; try"
OURS = installed_version("hyperparallel")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my loss", f"'my loss' {NO_NAME} 'my-loss'"),
        ("a/b", f"'a/b' {NO_NAME} 'a-b'"),
        ("_x_", f"'_x_' {NO_NAME} 'x'"),
        ("täglich", f"'täglich' {NO_NAME} 't-glich'"),
        ("", f"'' {NO_NAME} 'acme-loss'"),
        ("a" * 41, f"'{'a' * 41}' is longer than 40 characters"),
        ("3d-loss", "'3d-loss' would be imported as '3d_loss', which is not an identifier; try 'hp-3d-loss'"),
        ("class", "'class' would be imported as 'class', which is a keyword of Python; try 'hp-class'"),
        ("Queue", "'Queue' would hide the module 'queue' of the standard library; try 'hp-Queue'"),
        ("docs", "'docs' would be imported as 'docs', a folder that a package keeps other things in; try 'hp-docs'"),
        ("PyTest", f"a package 'PyTest' is installed already, version {pytest.__version__}; try 'hp-PyTest'"),
        ("hp.core", "a module 'hp_core' can be imported already, and one would hide the other; try 'hp-hp.core'"),
        ("causal-lm", f"hyperparallel {OURS} offers the loss_fn component 'causal_lm' already; try 'hp-causal-lm'"),
    ],
)
def test_a_name_that_would_not_work_is_refused(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, name, "--kind", "loss") == message


def test_a_name_is_taken_in_its_own_group_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "site"
    install(site, "zeta", entry_points={"hp.losses": {"acme_loss": "zeta:Loss"}, "hp.plugins": {"acme_watch": "zeta"}})
    with on_path(site):
        message = "zeta 1.0 offers the loss_fn component 'acme_loss' already; try 'hp-acme-loss'"
        assert refusal(capsys, "acme-loss", "--kind", "loss") == message
        message = "zeta 1.0 offers the plugin 'acme_watch' already; try 'hp-acme-watch'"
        assert refusal(capsys, "acme-watch", "--kind", "hooks") == message
        assert main(["new-plugin", "acme-loss", "--kind", "optimizer"]) == 0


def test_a_namespace_folder_gives_way_and_a_module_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "acme_loss").mkdir()
    (tmp_path / "acme_other.py").write_text("")
    assert main(["new-plugin", "acme-loss", "--kind", "loss"]) == 0
    capsys.readouterr()
    assert "a module 'acme_other' can be imported already" in refusal(capsys, "acme-other", "--kind", "loss")


def test_a_directory_that_is_not_free_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    told = refusal(capsys, "acme-loss", "--kind", "loss", "--to", "full")
    assert told == "the directory 'full' is not empty; write --to full/acme-loss"
    told = refusal(capsys, "acme-loss", "--kind", "loss", "--to=full/file")
    assert told == "'full/file' exists and is no directory; name another with --to"
    assert "exists and is no directory" in refusal(capsys, "acme-loss", "--kind", "loss", "--to", "link")
    told = refusal(capsys, "acme-loss", "--kind", "loss", "--to", "full/file/below")
    assert told == "'full/file/below' can't be written: Not a directory; name another with --to"
    # Both the name and the directory are wrong.
    assert len(refusal(capsys, "class", "--kind", "loss", "--to", "full").splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["acme"], "the following arguments are required: --kind; see 'hp-train new-plugin --help'"),
        (["acme", "--kind", "los"], "argument --kind: invalid choice: 'los'"),
        (["acme", "--kind", "loss", "--training.seed=1"], "new-plugin takes no recipe values: --training.seed=1"),
    ],
)
def test_the_command_line_is_checked(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, *arguments).startswith(message)


def test_an_empty_directory_will_do_and_a_name_with_a_blank_is_quoted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a b").mkdir()
    assert main(["new-plugin", "Acme.Loss", "--kind=loss", "--to=a b"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "Acme.Loss: a package with one entry point of hp.losses, in a b"
    assert printed[-3:] == [
        "  pip install -e './a b[test]'",
        "  python -m pytest './a b'",
        "  hp-train './a b/recipe.yaml'",
    ]
    assert (tmp_path / "a b" / "acme_loss" / "loss.py").is_file()


def test_what_the_manual_shows_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "writing-a-plugin.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^\$ hp-train new-plugin acme-loss --kind loss\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert main(["new-plugin", "acme-loss", "--kind", "loss"]) == 0
    assert capsys.readouterr().out == shown


def test_it_is_quick() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "hp_core", "new-plugin", "acme-loss", "--kind", "loss"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert not {"torch", "transformers", "datasets", "numpy", "pydantic"} & imported


def test_the_templates_are_installed_and_cover_every_kind() -> None:
    assert {path.name for path in TEMPLATES.iterdir()} == {*KINDS, "common"}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_names_one_thing_throughout(kind: str, tmp_path: Path) -> None:
    assert main(["new-plugin", LONG, "--kind", kind]) == 0
    assert len(LONG) == 40
    config = configparser.ConfigParser()
    config.read(tmp_path / LONG / "setup.cfg")
    package = import_name(LONG)
    ((name, value),) = config["options.entry_points"].items()
    assert name == KINDS[kind].group
    entry, _, target = value.strip().partition(" = ")
    assert (entry, target) == (package, f"{package}.{KINDS[kind].target}")
    module, _, attribute = target.partition(":")
    assert attribute in (tmp_path / LONG / f"{module.replace('.', '/')}.py").read_text()
    assert f"{LONG}:{package}\n" in (tmp_path / LONG / "recipe.yaml").read_text()
    assert config["options"]["install_requires"].split() == [f"hyperparallel>={'.'.join(OURS.split('.')[:2])}"]
    assert [path for path in (tmp_path / LONG).rglob("*") if "$" in path.name or "package" in path.name] == []


@pytest.mark.parametrize("line_length", ["88", "120"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_tidy(kind: str, line_length: str, tmp_path: Path) -> None:
    assert main(["new-plugin", LONG, "--kind", kind]) == 0
    rules = "E,F,W,I,B,UP,C4,SIM,RUF,PT,PIE,RET,N,D1"
    ruff = [sys.executable, "-m", "ruff"]
    options = ["--isolated", "--no-cache", "--target-version=py310", f"--line-length={line_length}"]
    for command in (["check", f"--select={rules}", "--ignore=D105,D107,N812"], ["format", "--diff"]):
        done = subprocess.run(
            [*ruff, *command, *options, "."], cwd=tmp_path / LONG, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


# The others differ in what their templates hold, which the tests above look at for every kind.
@pytest.mark.parametrize(
    "kind", [kind if kind in ("loss", "hooks") else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_its_tests_and_its_recipe_work_at_once(kind: str, tmp_path: Path) -> None:
    name = f"acme-{kind}"
    assert main(["new-plugin", name, "--kind", kind]) == 0
    package = tmp_path / name
    environment = Environment(tmp_path / "environment")
    commands = list(shell_commands(package / "README.md"))
    assert [command.split()[0] for command in commands] == ["pip", "python", "hp-train"]
    environment.succeed(commands[0], package)
    environment.succeed(commands[1], package, "-W", "error")
    environment.succeed(commands[2], package, "--training.train_iters=12", "--output_dir=run")
    rows = read_metrics(package / "run")
    assert rows[-1]["step"] == 12
