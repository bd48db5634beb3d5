from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hp_core import entry_points
from hp_core.cli import plugins
from hp_core.entry_points import Scan, scan
from hp_core.hooks import hook_manual
from tests.fakes import environment, install, on_path

HEADER = "from hp_core.hookspecs import hookimpl\n"

# What `hp-train plugins` amounts to, whatever else the command line does.
COMMAND = """
import argparse, sys
from hp_core.cli import plugins
parser = argparse.ArgumentParser()
plugins.add_parser(parser.add_subparsers())
arguments = parser.parse_args()
sys.exit(arguments.func(arguments))
"""


def call(*options: str) -> int:
    parser = argparse.ArgumentParser()
    plugins.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["plugins", *options])
    return int(arguments.func(arguments))


def bad_packages(site: Path) -> None:
    """Install a good plugin and four bad packages side by side."""
    good = HEADER + "@hookimpl\ndef build_loss(config):\n    return 1\n"
    for name, source in (
        ("good", good),
        ("import_error", "import nowhere_at_all"),
        ("misspelt", good.replace("build_loss", "bild_loss")),
        ("undecorated", "def build_loss(config):\n    return 1\n"),
        ("clash", good),
    ):
        install(
            site,
            f"{name}-dist",
            "1.2",
            entry_points={"hp.plugins": {name: f"fake_{name}"}},
            modules={f"fake_{name}": source},
        )
    install(site, "clash2-dist", "3.4", entry_points={"hp.plugins": {"clash": "fake_clash"}})


def test_the_table_lists_everything_without_importing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad_packages(tmp_path)
    with on_path(tmp_path):
        assert call() == 0
        assert not [name for name in sys.modules if name.startswith("fake_")]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["group", "name", "object", "package", "status"]
    column = lines[0].index("status")
    table = {line.split()[1]: line[column:] for line in lines[1:]}
    assert table["good"] == table["import_error"] == table["misspelt"] == "ok (not loaded)"
    assert table["clash"] == "clash: also offered by clash-dist; write 'clash2-dist:clash'"
    assert [line for line in lines if line.startswith("hp.losses") and " causal_lm " in line]
    assert not [line for line in lines if line != line.rstrip()]


def test_json_holds_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad_packages(tmp_path)
    install(tmp_path, "garbled", entry_points="[hp.losses]\nno equals sign\n")
    with on_path(tmp_path):
        assert call("--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert {
        "group": "hp.plugins",
        "name": "good",
        "value": "fake_good",
        "distribution": "good-dist",
        "version": "1.2",
        "status": "ok (not loaded)",
        "hooks": [],
    } in document["rows"]
    assert [text.split(":")[0] for text in document["unreadable"]] == ["garbled"]


def test_load_tells_good_from_bad_and_strict_makes_it_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad_packages(tmp_path)
    with on_path(tmp_path):
        # Our own components would import torch.
        fakes = Scan(tuple(one for one in scan().entries if one.distribution.endswith("-dist")), ())
        monkeypatch.setattr(entry_points, "scan", lambda: fakes)
        assert call("--load") == 0
        capsys.readouterr()
        assert call("--load", "--strict") == 2
    captured = capsys.readouterr()
    rows = {line.split()[1]: line for line in captured.out.splitlines()}
    assert captured.err == ""
    assert rows["good"].endswith("good-dist 1.2          ok: build_loss")
    assert "broken: ModuleNotFoundError: No module named 'nowhere_at_all'" in rows["import_error"]
    assert "did you mean 'build_loss'?" in rows["misspelt"]
    assert "isn't decorated" in rows["undecorated"]


def test_strict_is_content_with_what_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "acme", entry_points={"hp.losses": {"focal": "sys:path"}})
    with on_path(tmp_path):
        fakes = Scan(tuple(one for one in scan().entries if one.distribution == "acme"), ())
        monkeypatch.setattr(entry_points, "scan", lambda: fakes)
        assert call("--strict") == call("--strict", "--load") == 0


def test_unreadable_metadata_is_a_warning_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(tmp_path, "garbled", entry_points="[hp.losses]\nno equals sign\n")
    with on_path(tmp_path):
        assert call("--strict") == 2
    assert capsys.readouterr().err.startswith("warning: garbled: the metadata can't be read: ")


def test_hooks_prints_the_manual(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--hooks") == 0
    assert capsys.readouterr().out == hook_manual()


def test_an_empty_table_says_so() -> None:
    assert plugins._table([]) == "no installed package offers a component or plugin"


def test_listing_many_packages_is_quick_and_light(tmp_path: Path) -> None:
    for number in range(80):
        names = {f"n{number}_{index}": f"fake_{number}:x" for index in range(10)}
        install(tmp_path, f"many-{number}", entry_points={"hp.losses": names}, modules={f"fake_{number}": "x = 1"})
    code = "import time; start = time.perf_counter()\n" + COMMAND.replace(
        "sys.exit(arguments.func(arguments))",
        "arguments.func(arguments); print(time.perf_counter() - start, *sorted(sys.modules), file=sys.stderr)",
    )
    best, modules, lines = float("inf"), [], 0
    for _ in range(5):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code, "plugins"],
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            check=True,
        )
        best = min(best, time.perf_counter() - start)
        modules, lines = done.stderr.split()[1:], len(done.stdout.splitlines())
        if best < 0.3:
            break
    assert lines > 800
    assert not {"torch", "transformers", "numpy", "pluggy", "rich", "fake_0"} & set(modules)
    assert best < 1.0  # measured 0.25 s alone on two cores; the rest is for a loaded machine
