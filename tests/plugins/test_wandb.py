"""W&B's own files hold the rows, the recipe and how the run ended."""

from __future__ import annotations

import json
import math
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hp_core.errors import ArgumentError
from hp_core.observe.trackers import RunNames
from hp_plugins.trackers.wandb import WandbTracker
from tests.e2e.runs import hp_train_here, recipe

OFFLINE = "{name: wandb, project: p, mode: offline, group: g, job_type: sft, tags: [a, b], notes: some}"
RECIPE = {"training": {"seed": 3}, "loss_fn": None}


@pytest.fixture
def pb():
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    return wandb_internal_pb2


def tracker(run_dir: Path, **settings: Any) -> WandbTracker:
    names = RunNames(run_dir, continues=False)
    return WandbTracker(
        **{"project": "p", "mode": "offline", **settings}, run_dir=run_dir, recipe=RECIPE, run_names=names
    )


def payloads(path: Path) -> Iterator[bytes]:
    """The records of a log in the format of LevelDB, as W&B writes it: blocks of 32 KiB, pieces with 7 bytes ahead."""
    data, record = path.read_bytes(), b""
    assert data[:4] in (b":W&B", b"")
    place = 7
    while place < len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def records(run: Path, pb: Any, number: int = 1) -> list[list[Any]]:
    """The records of each W&B run of the directory, in the order of their starts, once they are all there.

    The process that writes them may still be at it when a run is finished.
    """
    until = time.monotonic() + 20
    while True:
        files = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
        found = [[pb.Record.FromString(one) for one in payloads(path)] for path in files]
        if len(found) == number and all(of_kind(one, "exit") for one in found):
            return found
        assert time.monotonic() < until
        time.sleep(0.05)


def of_kind(found: list[Any], kind: str) -> list[Any]:
    return [getattr(one, kind) for one in found if one.WhichOneof("record_type") == kind]


def rows(found: list[Any]) -> list[dict[str, Any]]:
    """The rows as W&B keeps them, without what it adds."""
    named = [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row.item}
        for row in of_kind(found, "history")
    ]
    return [{name: value for name, value in row.items() if not name.startswith("_")} for row in named]


def config(found: list[Any]) -> dict[str, Any]:
    (run,) = of_kind(found, "run")
    return {one.key: json.loads(one.value_json) for one in run.config.update}


def test_rows_are_kept_with_texts_and_without_what_is_none(tmp_path, pb):
    one = tracker(tmp_path)
    one.log({"step": 2, "loss": 2.5, "tokens": 64, "skipped": None})
    one.log({"step": 2, "eval_loss": 1.5})
    one.log({"step": 4, "loss": None, "skipped": "no tokens"})
    one.log({"step": 6, "loss": math.nan, "grad_norm": math.inf})
    one.close()
    (found,) = records(tmp_path, pb)
    assert rows(found)[:3] == [
        {"step": 2, "loss": 2.5, "tokens": 64},
        {"step": 2, "eval_loss": 1.5},
        {"step": 4, "skipped": "no tokens"},
    ]
    last = rows(found)[3]
    assert math.isnan(float(last["loss"]))
    assert math.isinf(float(last["grad_norm"]))
    assert {one.step_metric for one in of_kind(found, "metric") if one.glob_name == "*"} == {"step"}
    assert {name: value for name, value in config(found).items() if name != "_wandb"} == RECIPE
    (ended,) = of_kind(found, "exit")
    assert ended.exit_code == 0


def test_a_run_that_fails_is_marked_and_named_after_its_directory(tmp_path, pb):
    (tmp_path / "my-run").mkdir()
    one = tracker(tmp_path / "my-run")
    one.fail()
    one.close()
    (found,) = records(tmp_path / "my-run", pb)
    assert of_kind(found, "exit")[0].exit_code == 1
    (run,) = of_kind(found, "run")
    assert (run.display_name, run.project) == ("my-run", "p")


def test_a_run_that_goes_on_is_the_same_run_and_one_that_starts_over_another(tmp_path, pb):
    path = str(recipe(tmp_path))
    trackers = f"--trackers=[{OFFLINE}]"
    assert hp_train_here(path, trackers, "--training.stop_after=3").returncode == 0
    done = hp_train_here(path, trackers, "--checkpoint.resume=latest", "--training.log_every=2")
    assert done.returncode == 0, done.stderr
    assert "trackers[0]" not in done.stdout
    assert hp_train_here(path, trackers, "--overwrite", "--training.train_iters=1").returncode == 0
    first, second, third = records(tmp_path / "run", pb, 3)
    assert [row["step"] for row in rows(first)] == [1, 2, 3]
    assert [row["step"] for row in rows(second)] == [4, 6]
    runs = [of_kind(found, "run")[0] for found in (first, second, third)]
    assert runs[0].run_id == runs[1].run_id != runs[2].run_id
    assert (runs[0].run_group, runs[0].job_type, list(runs[0].tags), runs[0].notes) == ("g", "sft", ["a", "b"], "some")
    assert config(second)["training"]["log_every"] == 2
    assert config(second)["output_dir"] == str(tmp_path / "run")


def test_two_of_them_go_on_each_in_its_own_run(tmp_path, pb):
    path = str(recipe(tmp_path))
    trackers = (
        "--trackers=[{name: wandb, project: p, mode: offline}, {name: wandb, project: p, mode: offline, group: g}]"
    )
    assert hp_train_here(path, trackers, "--training.stop_after=3").returncode == 0
    done = hp_train_here(path, trackers, "--checkpoint.resume=latest")
    assert done.returncode == 0, done.stderr
    ids: dict[str, list[tuple[str, list[int]]]] = {"": [], "g": []}
    for found in records(tmp_path / "run", pb, 4):
        (run,) = of_kind(found, "run")
        ids[run.run_group].append((run.run_id, [row["step"] for row in rows(found)]))
    for first, second in ids.values():
        assert (first[1], second[1]) == ([1, 2, 3], [4, 5, 6])
        assert first[0] == second[0]
    assert ids[""][0][0] != ids["g"][0][0]


def test_the_same_one_twice_and_a_start_over_that_fails_lose_nothing(tmp_path, pb):
    path, one = str(recipe(tmp_path)), "{name: wandb, project: p, mode: offline}"
    assert hp_train_here(path, f"--trackers=[{one}]", "--training.stop_after=3").returncode == 0
    kept = (tmp_path / "run" / "trackers.json").read_text()
    done = hp_train_here(path, f"--trackers=[{one}, {one}]", "--overwrite")
    assert done.returncode == 2
    assert "trackers[1]: another tracker of the run is the same: wandb, project p" in done.stderr
    assert (tmp_path / "run" / "trackers.json").read_text() == kept
    done = hp_train_here(path, f"--trackers=[{one}]", "--checkpoint.resume=latest")
    assert done.returncode == 0, done.stderr
    first, _, last = (of_kind(found, "run")[0].run_id for found in records(tmp_path / "run", pb, 3))
    assert first == last


@pytest.mark.parametrize(
    ("settings", "path", "message"),
    [
        ({"project": "a/b"}, "project", "Invalid project name 'a/b'"),
        ({"tags": ["t" * 65]}, "tags", "Tags must be between 1 and 64 characters"),
    ],
)
def test_what_wandb_refuses_is_told_at_its_argument(tmp_path, pb, settings, path, message):
    with pytest.raises(ArgumentError) as caught:
        tracker(tmp_path, **settings)
    assert caught.value.path == path
    assert message in caught.value.message
    assert "login" not in caught.value.hint


def test_what_wandb_refuses_is_told_before_the_first_step(tmp_path, pb, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HOME", str(tmp_path))
    done = hp_train_here(str(recipe(tmp_path)), "--trackers=[{name: wandb, project: p, mode: online}]")
    assert done.returncode == 2
    assert "trackers[0]: W&B can't start the run: " in done.stderr
    assert "'wandb login', or write mode: offline" in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_without_wandb_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ArgumentError, match=r"wandb is not installed; pip install 'hyperparallel\[wandb\]'"):
        tracker(tmp_path)
