"""`hp-train` as a user meets it: exit codes, files, processes and the errors of a run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hp_core.observe.trackers import read_metrics
from hp_core.testing.ranks import RankError, run_ranks
from tests.conftest import ROOT
from tests.e2e.runs import captured, hp_train, hp_train_here, manifest, recipe, steps, train_here


def text_recipe(tmp_path: Path, extra: str = "") -> Path:
    files = tmp_path / "texts"
    files.mkdir()
    for index in range(30):
        (files / f"{index:02d}.txt").write_text(f"the {index}th text says {index * 7} and ends\n" * 5)
    path = recipe(tmp_path, extra=extra)
    text = path.read_text().replace(
        "  _target_: tests.e2e.parts.numbered_rows\n",
        f"  name: text\n  files: '{files}/*.txt'\n  max_seq_len: 48\n  validation_fraction: 0.1\n  tokenizer: bytes\n",
    )
    path.write_text(text.replace("vocab_size: 96", "vocab_size: 257"))
    return path


def test_a_run_leaves_its_files_and_a_row_for_each_step(tmp_path):
    path = text_recipe(
        tmp_path, "evaluation: {every: 3, samples: {prompts: ['the '], max_new_tokens: 5}}\ntrackers: [tensorboard]\n"
    )
    done = hp_train(str(path), "--training.train_iters=4")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    rows = read_metrics(run)
    assert steps(rows, "step") == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "eval_loss" in row] == [3, 4]
    assert {"loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_time_s"} <= set(rows[0])
    assert json.loads((run / "samples.jsonl").read_text())["text"].startswith("the ")
    assert list((run / "tensorboard").iterdir())
    assert re.search(r"step 4/4  loss \d\.\d+  grad norm .*  lr 0\.01  [\d,]+ tokens/s  ETA 0:00:00", done.stdout)
    facts = manifest(run)
    assert facts["data"]["train"]["documents"] + facts["data"]["validation"]["documents"] == 30
    assert facts["world"]["size"] == 1
    assert facts["versions"]["torch"]
    assert "train" in facts["command"] or str(path) in facts["command"]
    # The resolved recipe trains the same run again.
    again = hp_train_here(str(run / "recipe.yaml"), f"--output_dir={tmp_path / 'again'}")
    assert again.returncode == 0, again.stderr
    assert steps(read_metrics(tmp_path / "again")) == steps(rows)


def test_two_processes_by_the_launcher(tmp_path):
    path = recipe(tmp_path)
    alone = hp_train_here(str(path), f"--output_dir={tmp_path / 'alone'}")
    two = hp_train(str(path), "--nproc", "2")
    assert (alone.returncode, two.returncode) == (0, 0), two.stderr
    assert steps(read_metrics(tmp_path / "run")) == pytest.approx(steps(read_metrics(tmp_path / "alone")), abs=1e-5)
    assert manifest(tmp_path / "run")["world"] | {"threads": 0} == {
        "size": 2,
        "launcher": "torchrun",
        "device": "cpu",
        "backend": "gloo",
        "pp": 1,
        "dp_replicate": 1,
        "dp_shard": 2,
        "cp": 1,
        "tp": 1,
        "ep": 1,
        "threads": 0,
        "deterministic": False,
    }


def test_under_torchrun(tmp_path):
    path = recipe(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "hp_core"]
    done = captured([*torchrun, str(path), "--training.train_iters=2"], env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert manifest(tmp_path / "run")["world"]["size"] == 2
    assert len(steps(read_metrics(tmp_path / "run"))) == 2


def test_under_slurm(tmp_path):
    path = recipe(tmp_path)
    with_port = {"MASTER_PORT": str(20000 + os.getpid() % 20000), "SLURM_JOB_ID": "77", "SLURM_NTASKS": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "hp_core", str(path), "--training.train_iters=2"],
            cwd=ROOT,
            env={
                **os.environ,
                **with_port,
                "PYTHONPATH": str(ROOT),
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
                "SLURM_STEP_NODELIST": "localhost",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=180)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert manifest(tmp_path / "run")["world"]["launcher"] == "slurm"
    assert "step 2/2" in outputs[0]
    assert "step 2/2" not in outputs[1]


@pytest.mark.parametrize("nproc", [1, 2])
def test_what_is_found_while_building_is_told_once_with_its_place(tmp_path, nproc):
    path = recipe(tmp_path, extra="loss_fn:\n  name: causal_lm\n")
    text = path.read_text().replace(
        "optimizer: {name: adamw, lr: 1e-2}",
        "optimizer:\n  name: adamw\n  lr: 1e-2\n  groups:\n    - match: '*.nrom.weight'\n      lr: 1e-3",
    )
    path.write_text(text)
    line = text.splitlines().index("    - match: '*.nrom.weight'") + 1
    done = (hp_train if nproc > 1 else hp_train_here)(str(path), f"--launch.nproc={nproc}")
    assert done.returncode == 2
    expected = f"{path}:{line}:14: optimizer.groups[0].match: '*.nrom.weight' matches no parameter"
    assert [out for out in done.stderr.splitlines() if out.startswith(expected)], done.stderr
    assert len(done.stderr.splitlines()) == 1
    # Nothing is left in the way of the corrected recipe.
    assert not (tmp_path / "run").exists()


def test_five_faults_make_five_lines_and_build_nothing(tmp_path):
    path = recipe(tmp_path)
    text = path.read_text().replace("  seed: 3\n", "  seed: 3\n  train_itres: 4\n  micro_batch_size: two\n  seed: 4\n")
    text = text.replace("{name: adamw, lr: 1e-2}", "{name: adamwe, lr: 1e-2}")
    path.write_text(text + "loss_fn:\n  name: causal_lm\n  smoothing: 0.1\n")
    lines = path.read_text().splitlines()

    def place(needle: str, start: str) -> str:
        number = next(n for n, line in enumerate(lines, 1) if needle in line)
        return f"{path}:{number}:{lines[number - 1].index(start) + 1}: "

    for nproc in ("1", "2"):
        # The second would start processes; it does not get that far.
        done = hp_train_here(str(path), "--nproc", nproc)
        assert done.returncode == 2
        errors = done.stderr.splitlines()
        assert len(errors) == 5, done.stderr
        assert errors[0].startswith(place("adamwe", "adamwe") + "optimizer.name: ")
        assert "did you mean 'adamw'?" in errors[0]
        assert errors[1].startswith(place("train_itres", "train_itres") + "training.train_itres: unknown key")
        assert errors[2].startswith(place("two", "two") + "training.micro_batch_size: ")
        seed = max(n for n, line in enumerate(lines, 1) if "  seed: 4" in line)
        assert errors[3].startswith(f"{path}:{seed}:3: training.seed: ")
        assert str(seed - 3) in errors[3]
        assert errors[4].startswith(place("smoothing", "smoothing") + "loss_fn.smoothing: ")
        assert "label_smoothing" in errors[4]
        assert not (tmp_path / "run").exists()


def test_a_directory_that_holds_a_run_is_refused_or_replaced(tmp_path):
    path = recipe(tmp_path)
    assert hp_train_here(str(path), "--training.train_iters=3").returncode == 0
    refused = hp_train_here(str(path))
    assert refused.returncode == 2
    assert "already holds a run" in refused.stderr
    assert refused.stderr.startswith(f"{path}:")
    replaced = hp_train_here(str(path), "--training.train_iters=2", "--overwrite")
    assert replaced.returncode == 0, replaced.stderr
    assert steps(read_metrics(tmp_path / "run"), "step") == [1, 2]
    assert [one.name for one in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000002"]


def test_the_default_directory_is_named_by_recipe_and_time(tmp_path, monkeypatch):
    path = recipe(tmp_path)
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "output_dir" not in line))
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert hp_train_here(str(path), "--training.train_iters=1").returncode == 0
    names = sorted(one.name for one in (tmp_path / "runs").iterdir())
    assert len(names) == 2
    assert all(re.fullmatch(r"tiny-\d{8}-\d{6}(-2)?", name) for name in names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml"], "nowhere.yaml"),
        (["--nproc", "x"], "argument --nproc: invalid int value: 'x'"),
        ([], "the following arguments are required: recipe"),
        (["RECIPE", "--training.seed"], "--training.seed: a recipe value needs '='; write --training.seed=VALUE"),
        (["RECIPE", "--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["RECIPE", "--trianing.seed=1"], "did you mean 'training'?"),
        (["RECIPE", "--nproc", "0"], "launch.nproc"),
        (
            ["RECIPE", "--nproc", "4", "--fsdp_config.dp_shard_size=3"],
            "replicate x shard that would: 1 x 4, 2 x 2, 4 x 1",
        ),
        (
            ["RECIPE", "--nproc", "3"],
            "4 rows can't be cut into micro-batches of 1 on 3 ranks (--nproc 3); use a multiple of 3: 3 or 6",
        ),
        (["RECIPE", "--training.device=cuda"], "no CUDA device is visible"),
        (["RECIPE", "--training.backend=nccl"], "nccl does not run on the CPU"),
        (["RECIPE", "-p", "nothing"], "nothing"),
        (["RECIPE", "--model={name: causal_lm, config: {model_type: lama}}"], "did you mean 'llama'?"),
        (["RECIPE", "--model.config.hiden_size=3"], "did you mean 'hidden_size'?"),
    ],
)
def test_a_user_s_mistake_is_one_line_and_exit_code_2(tmp_path, arguments, message):
    path = recipe(tmp_path)
    done = hp_train_here(*(str(path) if argument == "RECIPE" else argument for argument in arguments))
    assert done.returncode == 2, done.stdout
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path):
    path = text_recipe(tmp_path)
    done = hp_train_here(str(path), "--model.config.vocab_size=200")
    assert done.returncode == 2
    assert "the tokenizer bytes has 257 tokens, the model's vocabulary only 200" in done.stderr
    assert "set model.config.vocab_size to 257 or more" in done.stderr


def test_a_bug_of_ours_shows_a_traceback_and_exit_code_1(tmp_path):
    path = recipe(tmp_path)
    done = hp_train(str(path), "--loss_fn={_target_: tests.e2e.parts.RaisingLoss, rank: 0, call: 2}")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("RuntimeError: the loss broke")


def test_a_run_killed_outright_leaves_no_process_and_resumes(tmp_path):
    path = recipe(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "hp_core", str(path), "--checkpoint.save_every=1", "--training.train_iters=2000"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 5/"):
            break
    process.kill()
    process.stdout.close()
    process.wait()
    done = hp_train_here(str(path), "--checkpoint.resume=latest", "--training.train_iters=12")
    assert done.returncode == 0, done.stderr
    rows = read_metrics(tmp_path / "run")
    assert steps(rows, "step") == list(range(1, 13))


def test_two_ranks_make_one_directory(tmp_path, monkeypatch):
    path = recipe(tmp_path)
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "output_dir" not in line))
    monkeypatch.chdir(tmp_path)
    run_ranks(train_here, 2, str(path), ["--training.train_iters=1"])
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_tracker_that_fails_does_not_cost_the_run_that_is_replaced(tmp_path):
    path = recipe(tmp_path)
    assert hp_train_here(str(path), "--training.train_iters=1").returncode == 0
    done = hp_train_here(str(path), "--trackers=[{_target_: tests.e2e.parts.broken_tracker}]", "--overwrite")
    assert done.returncode == 2
    assert "this tracker is not installed" in done.stderr
    assert len(read_metrics(tmp_path / "run")) == 1
    out = f"--output_dir={tmp_path / 'two'}"
    with pytest.raises(RankError, match="this tracker is not installed"):
        run_ranks(train_here, 2, str(path), ["--trackers=[{_target_: tests.e2e.parts.broken_tracker}]", out])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--loss_fn={_target_: tests.e2e.parts.WeighingLoss}"], "has the trainable parameter 'weight'"),
        (["--optimizer={_target_: tests.e2e.parts.stray_optimizer, lr: 0.1}"], "no parameter of the model"),
        (["--loss_fn={_target_: tests.e2e.parts.OddLoss}"], "can't be called with model_output and labels"),
        (["--loss_fn={_target_: tests.e2e.parts.TwoPartLoss, scael: 2}"], "loss_fn.scael: "),
        (["--plugins=[./plan.py]"], "too many parameters"),
    ],
)
def test_what_would_do_nothing_is_refused(tmp_path, overrides, message):
    (tmp_path / "plan.py").write_text(
        "from hp_core import hookimpl\n\n\n@hookimpl\ndef on_plan(plan):\n"
        "    from hp_core import InputError\n    raise InputError('too many parameters')\n"
    )
    done = hp_train_here(str(recipe(tmp_path)), *overrides)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_test_set_is_measured_at_the_end(tmp_path):
    path = recipe(tmp_path)
    done = hp_train_here(str(path), "--dataset.test_rows=4", "--dataset.validation_rows=4", "--training.train_iters=2")
    assert done.returncode == 0, done.stderr
    rows = read_metrics(tmp_path / "run")
    assert rows[-1]["step"] == 2
    assert rows[-1]["test_tokens"] == rows[-2]["eval_tokens"]
    assert rows[-1]["test_loss"] == pytest.approx(rows[-2]["eval_loss"], abs=1e-6)


def test_a_second_run_in_the_same_directory_is_refused(tmp_path):
    path = recipe(tmp_path)
    first = subprocess.Popen(
        [sys.executable, "-m", "hp_core", str(path), "--training.train_iters=5000"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert first.stdout is not None
    assert first.stderr is not None
    for line in first.stdout:
        if line.startswith("step 3/"):
            break
    for how in ("--overwrite", "--checkpoint.resume=latest"):
        second = hp_train_here(str(path), how)
        assert second.returncode == 2
        assert "another run is writing to" in second.stderr
    first.send_signal(signal.SIGINT)
    said = first.communicate(timeout=120)
    assert first.returncode == 75, said
    assert "--checkpoint.resume=latest goes on from there" in said[0]
    assert hp_train_here(str(path), "--training.train_iters=2", "--overwrite").returncode == 0


def test_workers_end_with_their_launcher(tmp_path):
    path = recipe(tmp_path)
    launcher = subprocess.Popen(
        [sys.executable, "-m", "hp_core", str(path), "--training.train_iters=50000", "--nproc", "2"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    for line in launcher.stdout:
        if line.startswith("step 3/"):
            break
    launcher.kill()
    launcher.wait()
    # The pipe ends when the last process that holds it is gone.
    launcher.stdout.read()
    launcher.stdout.close()
    assert hp_train_here(str(path), "--training.train_iters=2", "--overwrite").returncode == 0


@pytest.mark.parametrize(("name", "code"), [("TERM", 143), ("USR1", 138)])
@pytest.mark.parametrize("nproc", [1, 2])
def test_the_code_of_a_run_that_is_ended_before_it_trains_is_the_documented_one(tmp_path, name, code, nproc):
    command = f"{sys.executable} -m hp_core {recipe(tmp_path)} --nproc {nproc}"
    # Long before anything is imported, and, with several processes, before any of them listens.
    script = f"{command} & run=$!; sleep 0.3; kill -{name} $run; wait $run; echo $?"
    done = captured(["bash", "-c", script])
    assert done.stdout.split()[-1] == str(code), done.stderr
    assert str(code) in hp_train("--help").stdout
    assert not (tmp_path / "run").exists()


COLLECTOR = """\
import gc, json
from hp_core import hookimpl


@hookimpl
def on_train_end(run, report):
    (run.directory.path / "collector.json").write_text(json.dumps([gc.isenabled(), gc.get_freeze_count()]))
"""


def test_what_is_imported_is_left_out_of_the_search_for_garbage(tmp_path):
    (tmp_path / "collector.py").write_text(COLLECTOR)
    done = hp_train(str(recipe(tmp_path)), "-p", str(tmp_path / "collector.py"), "--training.train_iters=1")
    assert done.returncode == 0, done.stderr
    is_enabled, frozen = json.loads((tmp_path / "run" / "collector.json").read_text())
    assert is_enabled
    assert frozen > 100_000
