"""Traces of single steps: what is in them, on which ranks, and that they change no number."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_core.observe.trackers import read_metrics
from hp_core.testing.ranks import RankError
from tests.e2e.runs import hp_train_here, recipe, steps, train

THIRD_AND_FOURTH = ("--profiler.start_step=3", "--profiler.stop_step=4")


def files(run: Path) -> list[str]:
    folder = run / "profile"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def events(run: Path, name: str) -> list[dict[str, Any]]:
    """The events of a trace."""
    found = json.loads(gzip.decompress((run / "profile" / f"{name}.json.gz").read_bytes()))["traceEvents"]
    return [one for one in found if one.get("ph") == "X"]


def test_a_trace_and_a_table_of_the_steps_and_the_same_numbers(tmp_path):
    path = str(recipe(tmp_path))
    plain = hp_train_here(path, f"--output_dir={tmp_path / 'plain'}")
    done = hp_train_here(path, *THIRD_AND_FOURTH)
    assert plain.returncode == done.returncode == 0, done.stderr
    run = tmp_path / "run"
    for name in ("loss", "grad_norm"):
        assert steps(read_metrics(run), name) == steps(read_metrics(tmp_path / "plain"), name)
    assert files(run) == ["rank0.steps3-4.json.gz", "rank0.steps3-4.txt"]
    assert f"profile of steps 3 to 4, rank 0: {run}/profile" in done.stdout
    found = events(run, "rank0.steps3-4")
    marks = {one["name"]: one for one in found if one["name"].startswith("ProfilerStep")}
    assert set(marks) == {"ProfilerStep#3", "ProfilerStep#4"}
    # Four micro-batches a step, each a forward and a backward pass through the embedding.
    backward = [one for one in found if one["name"] == "aten::embedding_dense_backward"]
    assert len(backward) == 8
    for step in (3, 4):
        mark = marks[f"ProfilerStep#{step}"]
        inside = [one for one in backward if mark["ts"] <= one["ts"] <= mark["ts"] + mark["dur"]]
        assert len(inside) == 4
    table = (run / "profile" / "rank0.steps3-4.txt").read_text()
    assert "Self CPU" in table
    assert "aten::mm" in table
    shares = [float(line.split("%")[0].split()[-1]) for line in table.splitlines() if "aten::" in line]
    assert shares == sorted(shares, reverse=True)
    assert files(tmp_path / "plain") == []


def test_each_of_the_ranks_writes_its_own(tmp_path):
    train(recipe(tmp_path), "--profiler={start_step: 2, ranks: [1, 2]}", nproc=4, out=tmp_path / "out")
    assert files(tmp_path / "out") == [f"rank{rank}.step2.{end}" for rank in (1, 2) for end in ("json.gz", "txt")]
    assert [one["name"] for one in events(tmp_path / "out", "rank2.step2") if "ProfilerStep" in one["name"]] == [
        "ProfilerStep#2"
    ]


def test_the_first_step_and_the_last(tmp_path):
    assert hp_train_here(str(recipe(tmp_path)), "--profiler={start_step: 1, stop_step: 6}").returncode == 0
    marks = [one["name"] for one in events(tmp_path / "run", "rank0.steps1-6") if "ProfilerStep" in one["name"]]
    assert sorted(marks) == [f"ProfilerStep#{step}" for step in range(1, 7)]


@pytest.mark.parametrize(
    ("overrides", "path", "message"),
    [
        (["--profiler.start_step=7"], "profiler.start_step", "the run ends with step 6 (training.train_iters)"),
        (
            ["--profiler={start_step: 3, stop_step: 5}", "--training.stop_after=4"],
            "profiler.stop_step",
            "the run ends with step 4 (training.stop_after)",
        ),
        (
            ["--profiler={start_step: 1, stop_step: 7}", "--training={train_epochs: 1, global_batch_size: 4}"],
            "profiler.stop_step",
            "step 7: the run ends with step 6",
        ),
        (["--profiler={start_step: 1, ranks: [0, 1]}"], "profiler.ranks[1]", "no rank 1: the run has rank 0 alone"),
        (
            ["--profiler={start_step: 1, memory_snapshot: true}", "--training.device=cpu"],
            "profiler.memory_snapshot",
            "only CUDA's allocator keeps a history",
        ),
    ],
)
def test_what_can_t_be_profiled_is_told_before_the_first_step(tmp_path, overrides, path, message):
    done = hp_train_here(str(recipe(tmp_path)), *overrides)
    assert done.returncode == 2, done.stdout
    assert f"{path}: {message}" in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU")
def test_a_snapshot_without_cuda_is_refused_wherever_the_device_is_found_out(tmp_path):
    done = hp_train_here(str(recipe(tmp_path)), "--profiler={start_step: 1, memory_snapshot: true, ranks: [0, 3]}")
    assert done.returncode == 2
    assert "profiler.memory_snapshot: only CUDA's allocator" in done.stderr
    assert "profiler.ranks[1]: no rank 3" in done.stderr


def test_a_run_that_goes_on_profiles_what_is_left(tmp_path):
    path = str(recipe(tmp_path))
    assert hp_train_here(path, "--training.stop_after=3").returncode == 0
    done = hp_train_here(path, *THIRD_AND_FOURTH, "--checkpoint.resume=latest", "--training.stop_after=5")
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "run") == ["rank0.step4.json.gz", "rank0.step4.txt"]
    done = hp_train_here(path, *THIRD_AND_FOURTH, "--checkpoint.resume=latest")
    assert "profiler: the run goes on after step 5, so that none is left to profile" in done.stdout
    assert done.returncode == 0
    assert files(tmp_path / "run") == ["rank0.step4.json.gz", "rank0.step4.txt"]
    assert hp_train_here(path, "--overwrite").returncode == 0
    assert files(tmp_path / "run") == []


@pytest.mark.parametrize(
    ("step", "expected", "told"),
    [
        (1, [], "profiler: the run stopped after step 1, so that nothing was profiled"),
        (2, [], "profiler: the run stopped after step 2, so that nothing was profiled"),
        (3, ["rank0.step3.json.gz", "rank0.step3.txt"], "profile of step 3, rank 0: "),
        (4, ["rank0.steps3-4.json.gz", "rank0.steps3-4.txt"], "profile of steps 3 to 4, rank 0: "),
    ],
)
def test_a_signal_leaves_what_there_is(tmp_path, step, expected, told):
    """Four micro-batches a step: the signal comes in the last of `step`."""
    (tmp_path / "trigger.0").touch()
    loss = f"--loss_fn={{_target_: tests.e2e.signalling.SignallingLoss, trigger: {tmp_path}/trigger, call: {4 * step}}}"
    done = hp_train_here(str(recipe(tmp_path)), *THIRD_AND_FOURTH, loss)
    assert done.returncode == 75, done.stderr
    assert f"stopped after step {step}" in done.stdout
    assert done.stdout.count(told) == 1
    assert len(re.findall(r"^(?:profiler: |profile of )", done.stdout, re.MULTILINE)) == 1
    assert files(tmp_path / "run") == expected
    # Nothing is being recorded any more.
    with torch.profiler.profile() as again:
        torch.zeros(1)
    assert any(one.key == "aten::zeros" for one in again.key_averages())


def test_a_failure_gives_the_trace_up_and_is_what_is_told(tmp_path):
    loss = "--loss_fn={_target_: tests.e2e.parts.RaisingLoss, rank: 0}"
    done = hp_train_here(str(recipe(tmp_path)), "--profiler={start_step: 1, stop_step: 6}", loss)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == "RuntimeError: the loss broke"
    assert files(tmp_path / "run") == []
    with torch.profiler.profile() as again:
        torch.zeros(1)
    assert any(one.key == "aten::zeros" for one in again.key_averages())


def test_a_rank_that_fails_beside_a_profiled_one_is_told(tmp_path):
    loss = "--loss_fn={_target_: tests.e2e.parts.RaisingLoss, rank: 1}"
    with pytest.raises(RankError, match="the loss broke"):
        train(recipe(tmp_path), "--profiler={start_step: 1, stop_step: 6}", loss, nproc=2)
    assert files(tmp_path / "run") == []
