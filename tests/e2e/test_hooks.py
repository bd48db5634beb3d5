"""Plugins in a real run: observers are called, builders answer, wrappers add, and faults name their owner."""

from __future__ import annotations

import json

import pytest

from hp_core.observe.trackers import read_metrics
from tests.e2e.runs import hp_train_here, manifest, recipe, steps, train

OBSERVER = """
import json
from hp_core import hookimpl

calls = []


@hookimpl
def on_train_start(run):
    calls.append("start")


@hookimpl
def on_step_end(run, step):
    calls.append(f"step {step}")


@hookimpl
def on_evaluate(run, evaluation):
    calls.append(f"evaluate {evaluation['eval_tokens']}")


@hookimpl
def on_checkpoint(run, path):
    calls.append(path.name)


@hookimpl
def on_train_end(run, report):
    calls.append(f"end {report.steps}")
    (run.directory.path / "calls.json").write_text(json.dumps(calls))
"""

LOSS = """
from torch import nn
from hp_core import ModelOutputLoss, hookimpl


class Halved(ModelOutputLoss):
    def forward(self, *, model_output, labels):
        return model_output.loss / 2


@hookimpl
def build_loss(config):
    return Halved()
"""

WRAPPER = """
from hp_core import hookimpl


@hookimpl(wrapper=True)
def prepare_model_inputs(loss_fn, model_inputs, loss_inputs):
    inputs = yield
    return {**inputs, "input_ids": inputs["input_ids"] * 0}
"""

RAISING = """
from hp_core import hookimpl


@hookimpl
def on_step_end(run, step):
    if step == 2:
        raise ValueError("no more")


@hookimpl
def on_exception(run, error):
    print("saw", type(error).__name__)
"""


def test_observers_see_a_run_in_order(tmp_path):
    (tmp_path / "watch.py").write_text(OBSERVER)
    path = recipe(tmp_path, extra="plugins: [./watch.py]\n")
    settings = ["--training.train_iters=3", "--checkpoint.save_every=2", "--evaluation.every=2"]
    done = hp_train_here(str(path), *settings, "--dataset.validation_rows=2")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "calls.json").read_text()) == [
        *(
            "start",
            "step 1",
            "step 2",
            "evaluate 31",
            "step_00000002",
            "step 3",
            "step_00000003",
            "evaluate 31",
            "end 3",
        )
    ]
    assert manifest(tmp_path / "run")["plugins"][0]["hooks"] == [
        *("on_train_start", "on_step_end", "on_evaluate", "on_checkpoint", "on_train_end")
    ]


def test_a_plugin_s_loss_takes_the_place_of_the_default(tmp_path):
    (tmp_path / "halved.py").write_text(LOSS)
    path = recipe(tmp_path)
    plain = train(path, "--training.train_iters=1", out=tmp_path / "plain")
    for nproc in (1, 2):
        out = tmp_path / f"half{nproc}"
        rows = train(path, "--training.train_iters=1", "--plugins=[./halved.py]", nproc=nproc, out=out)
        assert steps(rows)[0] == pytest.approx(steps(plain)[0] / 2, rel=1e-6)


def test_an_installed_plugin_changes_nothing_unless_it_is_named(tmp_path):
    (tmp_path / "halved.py").write_text(LOSS)
    path = recipe(tmp_path)
    plain = train(path, "--training.train_iters=1", out=tmp_path / "plain")
    named = hp_train_here(str(path), "--training.train_iters=1", "-p", "./halved.py")
    assert named.returncode == 0, named.stderr
    assert steps(read_metrics(tmp_path / "run"))[0] == pytest.approx(steps(plain)[0] / 2, rel=1e-6)


def test_a_wrapper_changes_what_the_model_sees(tmp_path):
    (tmp_path / "wrap.py").write_text(WRAPPER)
    path = recipe(tmp_path)
    plain = train(path, "--training.train_iters=1", out=tmp_path / "plain")
    wrapped = train(path, "--training.train_iters=1", "--plugins=[./wrap.py]", out=tmp_path / "wrapped")
    assert steps(wrapped) != steps(plain)


def test_a_raising_plugin_ends_the_run_with_its_name(tmp_path):
    (tmp_path / "bad.py").write_text(RAISING)
    path = recipe(tmp_path, extra="plugins: [./bad.py]\n")
    done = hp_train_here(str(path))
    assert done.returncode == 1
    assert "bad.py" in done.stderr
    assert "on_step_end raised ValueError: no more" in done.stderr
    assert "saw PluginError" in done.stdout
    assert steps(read_metrics(tmp_path / "run"), "step") == [1, 2]


def test_two_answers_to_one_hook_are_refused(tmp_path):
    (tmp_path / "one.py").write_text(LOSS)
    (tmp_path / "two.py").write_text(LOSS.replace("/ 2", "/ 3"))
    path = recipe(tmp_path, extra="plugins: [./one.py, ./two.py]\n")
    for command in ("check", "train"):
        done = hp_train_here(command, str(path))
        assert done.returncode == 2
        assert "build_loss" in done.stderr
        assert "one.py" in done.stderr
        assert "two.py" in done.stderr
    assert not (tmp_path / "run").exists()


def test_recipe_and_plugin_faults_come_together(tmp_path):
    path = recipe(tmp_path, extra="plugins: [./nothing.py]\n")
    done = hp_train_here(str(path), "--training.sede=1")
    assert done.returncode == 2
    assert "did you mean 'seed'?" in done.stderr
    assert "nothing.py" in done.stderr
