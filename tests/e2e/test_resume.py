"""Stop anywhere and go on: the same losses bit for bit, and every row once."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from hp_core.errors import InputError
from hp_core.observe.trackers import read_metrics
from hp_core.testing.ranks import RankError
from tests.e2e.runs import hp_train_here, manifest, recipe, steps, train

# Dropout draws from the random streams, the warm-up makes every learning rate different, and 10 rows in batches of 4
# make an epoch of three steps, the last of them partial.
SETTINGS = (
    "--model.config.attention_dropout=0.2",
    "--lr_scheduler={name: cosine, warmup_steps: 3}",
    "--dataset.num_rows=10",
    "--training={train_epochs: 3, global_batch_size: 4, seed: 3}",
)


@pytest.mark.parametrize("nproc", [1, 2])
def test_stop_and_go_equals_the_unbroken_run_bit_for_bit(tmp_path, nproc):
    path = recipe(tmp_path)
    unbroken = train(path, *SETTINGS, nproc=nproc, out=tmp_path / "unbroken")
    assert steps(unbroken, "step") == list(range(1, 10))
    assert steps(unbroken, "samples") == [4, 8, 10, 14, 18, 20, 24, 28, 30]
    assert steps(unbroken, "epoch") == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    out = tmp_path / "broken"
    for stop_after in (1, 3, 4, 7, 9):
        resume = [] if stop_after == 1 else ["--checkpoint.resume=latest"]
        rows = train(path, *SETTINGS, f"--training.stop_after={stop_after}", *resume, nproc=nproc, out=out)
    for name in ("step", "loss", "grad_norm", "lr", "tokens", "total_tokens", "samples", "epoch"):
        assert steps(rows, name) == steps(unbroken, name), name


def test_what_is_told_of_a_run_s_own_recipe_goes_on_with_it(tmp_path, monkeypatch):
    path = recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "it's one"
    done = hp_train_here(str(path), f"--output_dir={out}", "--training.train_iters=2", "--training.stop_after=1")
    assert done.returncode == 0, done.stderr
    refused = hp_train_here(str(out / "recipe.yaml"), "--checkpoint.resume=latest")
    assert refused.returncode == 2
    copied, command = refused.stderr.partition("go on by a copy of it: ")[2].split(" && ")
    _, source, target = shlex.split(copied)
    shutil.copy(source, target)
    again = hp_train_here(*shlex.split(command)[1:], "--training.stop_after=null")
    assert again.returncode == 0, again.stderr
    assert steps(read_metrics(out), "step") == [1, 2]


@pytest.mark.parametrize("nproc", [1, 2])
def test_what_a_loss_remembers_goes_on_too(tmp_path, nproc):
    path = recipe(tmp_path)
    loss = "--loss_fn={_target_: tests.e2e.parts.RememberingLoss}"
    unbroken = train(path, *SETTINGS, loss, nproc=nproc, out=tmp_path / "unbroken")
    out = tmp_path / "broken"
    for stop_after, resume in ((4, []), (9, ["--checkpoint.resume=latest"])):
        rows = train(path, *SETTINGS, loss, f"--training.stop_after={stop_after}", *resume, nproc=nproc, out=out)
    assert steps(rows) == steps(unbroken)
    assert steps(rows)[4] != pytest.approx(steps(train(path, *SETTINGS, nproc=nproc, out=tmp_path / "plain"))[4])


def test_an_evaluation_leaves_what_a_loss_remembers(tmp_path):
    path = recipe(tmp_path)
    common = ["--loss_fn={_target_: tests.e2e.parts.CountingLoss}", "--dataset.validation_rows=5"]
    plain = train(path, *common, "--evaluation.at_end=false", out=tmp_path / "plain")
    rows = train(path, *common, "--evaluation.every=2", out=tmp_path / "evaluated")
    assert steps(rows) == steps(plain)


def test_workers_change_nothing(tmp_path):
    path = recipe(tmp_path)
    plain = train(path, *SETTINGS, out=tmp_path / "plain")
    for workers in (1, 3):
        rows = train(path, *SETTINGS, f"--dataloader.num_workers={workers}", nproc=1, out=tmp_path / f"w{workers}")
        assert steps(rows) == steps(plain)


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2), (2, 4)])
def test_another_number_of_ranks_goes_on_with_the_same_rows(tmp_path, first, second):
    path = recipe(tmp_path)
    settings = [*SETTINGS[1:]]
    unbroken = train(path, *settings, out=tmp_path / "unbroken")
    out = tmp_path / "broken"
    train(path, *settings, "--training.stop_after=4", nproc=first, out=out)
    rows = train(path, *settings, "--checkpoint.resume=latest", nproc=second, out=out)
    assert steps(rows) == pytest.approx(steps(unbroken), abs=1e-5)
    assert steps(rows, "samples") == steps(unbroken, "samples")
    assert steps(rows, "lr") == steps(unbroken, "lr")


def test_rows_past_the_checkpoint_are_taken_back(tmp_path):
    path = recipe(tmp_path)
    out = tmp_path / "run"
    unbroken = train(path, "--checkpoint.save_every=2", out=out)
    shutil.rmtree(out / "checkpoints" / "step_00000006")
    rows = train(path, "--checkpoint.save_every=2", "--checkpoint.resume=latest", out=out)
    assert steps(rows, "step") == [1, 2, 3, 4, 5, 6]
    assert steps(rows) == steps(unbroken)


def test_a_path_starts_a_new_run_elsewhere_from_a_checkpoint(tmp_path):
    path = recipe(tmp_path)
    first = train(path, "--checkpoint.save_every=3", out=tmp_path / "first")
    checkpoint = tmp_path / "first" / "checkpoints" / "step_00000003"
    rows = train(path, f"--checkpoint.resume={checkpoint}", out=tmp_path / "second")
    assert steps(rows, "step") == [4, 5, 6]
    assert steps(rows) == steps(first)[3:]


def test_a_changed_learning_rate_acts_after_a_resume(tmp_path):
    path = recipe(tmp_path)
    out = tmp_path / "run"
    train(path, "--training.stop_after=3", "--lr_scheduler=constant", out=out)
    rows = train(path, "--checkpoint.resume=latest", "--optimizer.lr=5e-3", "--lr_scheduler=constant", out=out)
    assert steps(rows, "lr") == [0.01] * 3 + [0.005] * 3


def test_latest_without_a_checkpoint_starts_anew_and_says_so(tmp_path):
    path = recipe(tmp_path)
    done = hp_train_here(str(path), "--checkpoint.resume=latest", "--training.train_iters=1")
    assert done.returncode == 0, done.stderr
    assert "no complete checkpoint was found: starting at step 0" in done.stdout


def test_a_finished_run_has_nothing_to_do(tmp_path):
    path = recipe(tmp_path)
    train(path, "--training.train_iters=2")
    done = hp_train_here(str(path), "--training.train_iters=2", "--checkpoint.resume=latest")
    assert done.returncode == 0, done.stderr
    assert "nothing to do: the run has taken 2 of 2 steps" in done.stdout
    assert steps(read_metrics(tmp_path / "run"), "step") == [1, 2]


def test_a_run_that_has_reached_stop_after_names_it(tmp_path):
    path = recipe(tmp_path)
    train(path, "--training.stop_after=2")
    done = hp_train_here(str(path), "--training.stop_after=2", "--checkpoint.resume=latest")
    assert done.returncode == 0, done.stderr
    assert "nothing to do: training.stop_after is 2, and the run has taken 2 of 6 steps" in done.stdout


def test_incomplete_checkpoints_are_passed_over(tmp_path):
    path = recipe(tmp_path)
    unbroken = train(path, "--checkpoint.save_every=2", out=tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step_00000006"
    (newest / ".metadata").unlink()
    done = hp_train_here(str(path), "--checkpoint.save_every=2", "--checkpoint.resume=latest")
    assert done.returncode == 0, done.stderr
    assert f"passed over {newest}: incomplete: .metadata is missing" in done.stdout
    assert "(step 4)" in done.stdout
    assert steps(read_metrics(tmp_path / "run")) == steps(unbroken)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--training.seed=4"], "was trained with seed 3"),
        (
            ["--model.dtype=bfloat16"],
            "torch.float32 (96, 32) there and torch.bfloat16 (96, 32) in",
        ),
        (["--dataset.num_rows=11"], "the training data is not what the run was trained on"),
        (["--optimizer={name: sgd, lr: 0.1}"], "made with other plugins or components"),
        (
            ["--optimizer={name: sgd, lr: 0.1}", "--checkpoint.allow_plugin_changes=true"],
            "written with AdamW, the recipe builds SGD",
        ),
        (["--model.config.hidden_size=64"], "made with another model"),
        (
            ["--model.config.num_hidden_layers=1"],
            "made with another model: 'model.layers.1.input_layernorm.weight' is not in the recipe's model",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, changes, message):
    path = recipe(tmp_path)
    train(path, "--training.stop_after=2")
    with pytest.raises((RankError, InputError)) as caught:
        train(path, "--checkpoint.resume=latest", *changes)
    assert message in str(caught.value)
    assert "InputError" in str(caught.value)


@pytest.mark.parametrize("optimizer", ["{name: sgd, lr: 0.1}", "{_target_: tests.e2e.parts.stray_optimizer, lr: 0.1}"])
def test_nothing_is_said_to_help_where_the_optimizer_is_another(tmp_path, optimizer):
    path = recipe(tmp_path)
    train(path, "--training.stop_after=2")
    done = hp_train_here(str(path), "--checkpoint.resume=latest", f"--optimizer={optimizer}")
    assert done.returncode == 2
    assert "allow_plugin_changes" not in done.stderr
    assert done.stderr.rstrip().endswith("can't be carried over: write the one of before, adamw")


def test_a_path_that_holds_no_checkpoint_is_refused(tmp_path):
    path = recipe(tmp_path)
    with pytest.raises(RankError, match="can't resume from '/nowhere': no such directory"):
        train(path, "--checkpoint.resume=/nowhere")


def test_the_directory_of_the_checkpoints_is_told_to_be_that_of_the_run(tmp_path):
    path = recipe(tmp_path)
    train(path, "--training.stop_after=1")
    inside = tmp_path / "run" / "checkpoints"
    for command in (
        [str(path), f"--checkpoint.resume={inside}/"],
        ["export", str(inside), "--to", str(tmp_path / "x")],
    ):
        done = hp_train_here(*command)
        assert done.returncode == 2
        assert done.stderr.rstrip().endswith(f"name the run itself: {tmp_path / 'run'}")


def test_plugin_changes_can_be_allowed(tmp_path):
    path = recipe(tmp_path)
    (tmp_path / "quiet.py").write_text(
        "from hp_core import hookimpl\n\n\n@hookimpl\ndef on_step_end(run, step):\n    del run, step\n"
    )
    train(path, "--training.stop_after=2")
    again = ["--checkpoint.resume=latest", "--plugins=[./quiet.py]"]
    with pytest.raises(RankError, match=r"plugin quiet\.py .* is new; --checkpoint.allow_plugin_changes=true goes on"):
        train(path, *again)
    rows = train(path, *again, "--checkpoint.allow_plugin_changes=true")
    assert steps(rows, "step") == [1, 2, 3, 4, 5, 6]
    assert [plugin["hooks"] for plugin in manifest(tmp_path / "run")["plugins"]] == [["on_step_end"]]


def test_a_checkpoint_knows_its_plugins_and_position(tmp_path):
    import json

    path = recipe(tmp_path)
    train(path, "--training.train_iters=2")
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000002"
    assert {one["name"] for one in json.loads((checkpoint / "manifest.json").read_text())["components"]} >= {
        "adamw",
        "causal_lm",
        "text",
    }
    state = json.loads((checkpoint / "trainer_state.json").read_text())["state"]
    assert state["position"] == {"consumed": 8, "epoch": 0, "offset": 8}
    assert state["step"] == state["updates"] == 2
    assert not list(Path(checkpoint.parent).glob("*.tmp"))


def test_going_back_in_the_same_run_sets_later_checkpoints_aside(tmp_path):
    path = recipe(tmp_path)
    out = tmp_path / "run"
    unbroken = train(path, "--checkpoint.save_every=2", out=out)
    back = f"--checkpoint.resume={out / 'checkpoints' / 'step_00000002'}"
    rows = train(path, back, "--training.stop_after=3", out=out)
    assert steps(rows, "step") == [1, 2, 3]
    kept = sorted(one.name for one in (out / "checkpoints").iterdir())
    assert kept == [*("abandoned_step_00000004", "abandoned_step_00000006", "step_00000002", "step_00000003")]
    rows = train(path, "--checkpoint.resume=latest", "--checkpoint.keep_last=1", out=out)
    assert steps(rows) == steps(unbroken)
    assert [one.name for one in (out / "checkpoints").iterdir()] == ["step_00000006"]


def test_broken_checkpoints_of_later_steps_do_not_take_the_place_of_new_ones(tmp_path):
    path = recipe(tmp_path)
    train(path, "--training.train_iters=5")
    (old,) = (tmp_path / "run" / "checkpoints").iterdir()
    for shard in old.glob("*.distcp"):
        shard.write_bytes(b"")
    train(path, "--checkpoint.resume=latest", "--training.train_iters=2", "--checkpoint.keep_last=1")
    kept = sorted(one.name for one in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["abandoned_step_00000005", "step_00000002"]


@pytest.mark.parametrize("resume", ["latest", "run", "run/checkpoints/step_00000002"])
def test_a_checkpoint_that_another_run_has_left_behind_meanwhile_is_refused(tmp_path, resume):
    """Two that are started at once look for a checkpoint before one of them gets the directory."""
    path = recipe(tmp_path)
    run = tmp_path / "run"
    train(path, "--training.stop_after=2")
    source, copy = (run / "checkpoints" / f"step_{step:08d}" for step in (2, 4))
    dataset = f"--dataset={{_target_: tests.e2e.parts.rows_of_two_runs, source: {source}, copy: {copy}}}"
    resume = resume.replace("run", str(run))
    settings = ("--checkpoint.allow_plugin_changes=true", "--training.stop_after=3")
    done = hp_train_here(str(path), dataset, f"--checkpoint.resume={resume}", *settings)
    if "step_" in resume:
        # Whoever names a checkpoint means that one.
        assert done.returncode == 0, done.stderr
        assert sorted(one.name for one in copy.parent.iterdir())[0] == "abandoned_step_00000004"
        return
    assert done.returncode == 1
    told = f"error: another run has written to '{run}' since this one began; the newest checkpoint is now {copy}"
    assert done.stderr == f"{told}; start again\n"
    assert sorted(one.name for one in copy.parent.iterdir()) == [source.name, copy.name]


@pytest.mark.parametrize(("resume", "code"), [("null", 2), ("latest", 1)])
def test_a_run_that_has_come_into_the_directory_meanwhile_is_not_written_over(tmp_path, resume, code):
    path = recipe(tmp_path)
    train(path, "--training.stop_after=2", out=tmp_path / "other")
    source, copy = tmp_path / "other" / "checkpoints", tmp_path / "run" / "checkpoints"
    dataset = f"--dataset={{_target_: tests.e2e.parts.rows_of_two_runs, source: {source}, copy: {copy}}}"
    done = hp_train_here(str(path), dataset, f"--checkpoint.resume={resume}")
    assert done.returncode == code
    assert ("another run has written to" if resume == "latest" else "already holds a run") in done.stderr
    assert [one.name for one in copy.iterdir()] == ["step_00000002"]
