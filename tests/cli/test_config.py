"""`hp-train config`."""

from __future__ import annotations

import json
import pathlib

import pytest

from hp_core.cli import config
from tests.cli.recipes import invoke, use_components, write
from tests.config.conftest import MINIMAL


@pytest.fixture(autouse=True)
def components(monkeypatch: pytest.MonkeyPatch) -> None:
    use_components(monkeypatch)
    monkeypatch.setenv("JOB", "hush")


def test_resolved_recipe(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, f"{MINIMAL}output_dir: runs/${{env:JOB}}\n")
    assert invoke(config, path, overrides=("--training.seed=3",)) == 0
    shown = capsys.readouterr().out
    assert f"output_dir: runs/${{env:JOB}}  # {path}:5:13" in shown.splitlines()
    assert "  seed: 3  # --training.seed=3" in shown.splitlines()
    assert "  log_every: 1  # default" in shown.splitlines()
    assert "hush" not in shown


def test_entries_are_shown_with_their_origins(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"{MINIMAL}plan_overrides:\n- match: a\n  module_type: torch.nn.Linear\n  replace_module: fast_norm\n"
    path = write(tmp_path, text)
    options = ("--plan_overrides[0].exact_type=true", "--plan_overrides[0].replace_module.eps=1e-5")
    assert invoke(config, path, overrides=options) == 0
    shown = capsys.readouterr().out.splitlines()
    start = shown.index("plan_overrides:")
    assert shown[start + 1 : start + 9] == [
        f"  - match: a  # {path}:6:10",
        "    when: null  # default",
        f"    module_type: torch.nn.Linear  # {path}:7:16",
        f"    exact_type: true  # {options[0]}",
        "    replace_module:",
        f"      name: fast_norm  # {path}:8:19",
        f"      eps: 1.0e-05  # {options[1]}",
        "      # mode: plain  # default",
    ]


def test_json(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(config, write(tmp_path, f"{MINIMAL}output_dir: ${{env:JOB}}\n"), "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["training"]["train_iters"] == 10
    assert data["training"]["seed"] == 42
    assert data["output_dir"] == "${env:JOB}"


def test_diff(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    left, right = write(tmp_path, MINIMAL), write(tmp_path, MINIMAL.replace("10", "20"), "other.yaml")
    assert invoke(config, left, "--diff", right) == 0
    assert capsys.readouterr().out == f"training.train_iters: 10 ({left}:4:25) -> 20 ({right}:4:25)\n"
    assert invoke(config, left, "--diff", left) == 0
    assert capsys.readouterr().out == "no differences\n"
    assert invoke(config, left, "--diff", right, "--json") == 0
    assert json.loads(capsys.readouterr().out)[0].startswith("training.train_iters: 10")
