"""`hp-train check`."""

from __future__ import annotations

import pathlib

import pytest

from hp_core.cli import check
from hp_core.errors import EXIT_USER_INPUT, InputError
from tests.cli.recipes import invoke, use_components, write
from tests.config.conftest import MINIMAL


@pytest.fixture(autouse=True)
def components(monkeypatch: pytest.MonkeyPatch) -> None:
    use_components(monkeypatch)


def test_faultless(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, MINIMAL)
    assert invoke(check, path, overrides=("--training.global_batch_size=4",)) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: ok",
        "model net, dataset rows, loss the model's own, optimizer sgd, 10 steps of 4 rows",
        "loss_fn: not tried: the batches of trainer text are its own, and there are only rows of text here; a run is "
        "the first to call it",
    ]


def test_summary_of_other_lengths(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, MINIMAL.replace("train_iters", "train_epochs") + "loss_fn: causal_lm\n")
    assert invoke(check, path) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("loss causal_lm, optimizer sgd, 10 epochs")


def test_every_fault_comes_with_those_of_plugins_and_overrides(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, f"plugins: [nowhere]\n{MINIMAL}launch: {{nprok: 1}}\n")
    with pytest.raises(InputError) as caught:
        invoke(check, path, overrides=("--training.seed=x",))
    first, second, third = str(caught.value).splitlines()
    assert first.startswith(f"{path}:1:11: plugins[0]: ")
    assert "nowhere" in first
    assert second == f"{path}:6:10: launch.nprok: unknown key; did you mean 'nproc'?"
    assert third == "--training.seed=x: training.seed: expected an integer, got the text 'x'"
    assert caught.value.exit_code == EXIT_USER_INPUT


def test_faulty_entry(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, f"{MINIMAL}plan_overrides:\n- match: []\n  replace_module: fast_nrom\n")
    with pytest.raises(InputError) as caught:
        invoke(check, path, overrides=("--plan_overrides[0].exact_type=true",))
    first, second, third = str(caught.value).splitlines()
    assert first == f"{path}:6:10: plan_overrides[0].match: must not be empty"
    assert second.startswith(f"{path}:7:19: plan_overrides[0].replace_module.name: no ")
    assert "did you mean 'fast_norm'?" in second
    assert third.startswith("--plan_overrides[0].exact_type=true: plan_overrides[0].exact_type: needs module_type")
    assert caught.value.exit_code == EXIT_USER_INPUT


def test_plugin_option(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        invoke(check, write(tmp_path, MINIMAL), "-p", "nowhere")


def test_no_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InputError, match="can't read this file: No such file"):
        invoke(check, str(tmp_path / "none.yaml"))
