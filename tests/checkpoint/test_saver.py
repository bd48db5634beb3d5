"""Saves in the background: what is written is what was there at the call, one at a time, and failures are told."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import hp_core.checkpoint.saver as saver_module
import hp_core.checkpoint.writing as writing
from hp_core.checkpoint.integrity import HashingFile
from hp_core.checkpoint.layout import complete_checkpoints, step_directory
from hp_core.checkpoint.saver import Saver
from hp_core.errors import RunError
from hp_core.testing.ranks import run_ranks
from tests.checkpoint.helpers import Trained, same, settings
from tests.model.tiny import a_setup


class Gate:
    """Holds writers back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        original = saver_module.write_checkpoint

        def held_back(*arguments: Any, **named: Any) -> list[str]:
            assert self.opened.wait(30)
            return original(*arguments, **named)

        monkeypatch.setattr(saver_module, "write_checkpoint", held_back)


@pytest.fixture
def gate(monkeypatch):
    return Gate(monkeypatch)


@pytest.fixture
def setup():
    with a_setup() as setup:
        yield setup


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Counter(torch.nn.Module):
    """A loss with a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))


def test_what_is_written_is_what_was_there_at_the_call(tmp_path, setup, gate):
    run, saver = Trained(setup), Saver(tmp_path, settings(**{"async": True}), setup)
    run.loss_fn = Counter()
    run.optimizer.state[run.model.lm_head.weight]["note"] = 1.5
    plugin = {"list": [1], "tensor": torch.zeros(2)}
    contents = run.contents(plugin_state={"p": plugin}, trainer_state={"metrics": {"loss": 1.0}})
    at_the_call = run.tensors()
    torch.manual_seed(11)
    assert saver.start(contents) == []
    drawn = torch.rand(3)
    # All of it changes before a byte is written.
    run.take_step()
    run.loss_fn.seen += 7
    run.optimizer.state[run.model.lm_head.weight]["note"] = 2.5
    plugin["list"].append(2)
    plugin["tensor"] += 1
    contents.trainer_state["metrics"]["loss"] = 9.0
    contents.manifest["step"] = 9
    assert not same(run.tensors(), at_the_call)
    assert (saver.is_done, saver.has_failed) == (False, False)
    gate.opened.set()
    wait_until(lambda: saver.is_done)
    path = step_directory(tmp_path, 1)
    assert saver.finish() == [path]
    assert (saver.is_done, saver.finish()) == (False, [])

    again = Trained(setup, steps=0)
    again.loss_fn = Counter()
    restored = again.load(path)
    assert torch.equal(torch.rand(3), drawn)
    assert again.loss_fn.seen.tolist() == [0, 0]
    assert restored.plugin_state["p"]["list"] == [1]
    assert restored.plugin_state["p"]["tensor"].tolist() == [0, 0]
    (checkpoint,) = complete_checkpoints(tmp_path)
    assert checkpoint.trainer_state()["metrics"] == {"loss": 1.0}
    assert checkpoint.manifest() == {"step": 1}
    assert again.optimizer.state[again.model.lm_head.weight].pop("note") == 1.5
    at_the_call.pop("lm_head.weight/note", None)
    assert same(again.tensors(), at_the_call)


def test_one_is_in_flight_and_the_next_waits_for_it(tmp_path, setup, gate):
    run, saver = Trained(setup), Saver(tmp_path, settings(**{"async": True}), setup)
    first = run.tensors()
    assert saver.start(run.contents(1)) == []
    run.take_step()
    second = run.tensors()
    threading.Timer(0.2, gate.opened.set).start()
    assert saver.start(run.contents(2)) == [step_directory(tmp_path, 1)]
    run.take_step()
    assert saver.finish() == [step_directory(tmp_path, 2)]
    for step, wanted in ((1, first), (2, second)):
        again = Trained(setup, steps=0)
        again.load(step_directory(tmp_path, step))
        assert same(again.tensors(), wanted)


def test_copies_are_written_over_only_by_the_next_save(tmp_path, setup):
    run, saver = Trained(setup, steps=0), Saver(tmp_path, settings(**{"async": True}), setup)
    # Before the first step there is no state of the optimizer, and afterwards there is.
    saver.start(run.contents(0))
    run.take_step()
    saver.start(run.contents(1))
    held = {id(one) for one in saver._copies._buffers.values()}
    run.take_step()
    saver.start(run.contents(2))
    assert {id(one) for one in saver._copies._buffers.values()} == held
    saver.finish()
    again = Trained(setup, steps=0)
    again.load(step_directory(tmp_path, 2))
    assert same(again.tensors(), run.tensors())


def test_a_failure_in_the_background_surfaces(tmp_path, setup, monkeypatch):
    run, saver = Trained(setup), Saver(tmp_path, settings(**{"async": True}), setup)
    saver.start(run.contents(1))
    assert saver.finish() == [step_directory(tmp_path, 1)]
    monkeypatch.setattr(HashingFile, "write", full_after(2000))
    saver.start(run.contents(2))
    wait_until(lambda: saver.has_failed)
    assert not saver.is_done
    with pytest.raises(RunError, match=r"can't write checkpoint .*step_00000002: rank 0: OSError: .*No space left"):
        saver.finish()
    assert [one.name for one in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
    monkeypatch.undo()
    # The next call of whatever kind would have told too.
    monkeypatch.setattr(HashingFile, "write", full_after(0))
    saver.start(run.contents(3))
    with pytest.raises(RunError, match="step_00000003"):
        saver.start(run.contents(4))
    assert saver.finish() == []


def test_an_abandoned_save_of_a_single_process_is_completed(tmp_path, setup, gate):
    run, saver = Trained(setup), Saver(tmp_path, settings(**{"async": True}), setup)
    saver.start(run.contents(1))
    threading.Timer(0.1, gate.opened.set).start()
    saver.abandon()
    assert [one.step for one in complete_checkpoints(tmp_path)] == [1]
    assert saver.finish() == []


def test_deletion_comes_after_the_next_is_complete(tmp_path, setup, monkeypatch):
    run, saver = Trained(setup), Saver(tmp_path, settings(keep_last=1), setup)
    saver.start(run.contents(1))
    monkeypatch.setattr(writing, "put_in_place", full_after(0))
    with pytest.raises(RunError):
        saver.start(run.contents(2))
    assert [one.step for one in complete_checkpoints(tmp_path)] == [1]
    monkeypatch.undo()
    saver.start(run.contents(2))
    assert [one.name for one in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
    assert saver.take_notes() == []


def test_what_can_t_be_deleted_is_noted(tmp_path, setup, monkeypatch):
    run, saver = Trained(setup), Saver(tmp_path, settings(**{"async": True}, keep_last=1), setup)
    saver.start(run.contents(1))
    saver.finish()

    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("hp_core.checkpoint.retention.remove", refused)
    saver.start(run.contents(2))
    assert saver.finish() == [step_directory(tmp_path, 2)]
    assert saver.take_notes() == [f"can't delete {step_directory(tmp_path, 1)}: Permission denied"]
    assert saver.take_notes() == []


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {1}}, r"plugin 'p': save_state\['a'\] is a set; a checkpoint holds dicts"),
        ({"a": [0, {3: 1}]}, r"plugin 'p': save_state\['a'\]\[1\] has the key 3; keys are strings"),
        ({"a": object()}, r"save_state\['a'\] is a object"),
    ],
)
def test_what_a_plugin_can_t_keep_is_refused(tmp_path, setup, state, message):
    saver = Saver(tmp_path, settings(), setup)
    with pytest.raises(RunError, match=message):
        saver.start(Trained(setup).contents(plugin_state={"p": state}))
    assert not (tmp_path / "checkpoints").exists()


def full_after(number: int) -> Any:
    """A writer for whom the disk is full after so many bytes."""
    write = HashingFile.write

    def limited(file: HashingFile, data: Any) -> int:
        if not isinstance(file, HashingFile) or file.tell() + len(memoryview(data).cast("B")) > number:
            file.failure = OSError(28, "No space left on device")
            raise file.failure
        return write(file, data)

    return limited


# On several ranks.


def fails_on_ranks(environment: Any, run: str, rank: int, in_background: bool) -> Any:
    with a_setup(environment) as setup:
        trained = Trained(setup)
        saver = Saver(Path(run), settings(**{"async": in_background}), setup)
        saver.start(trained.contents(1))
        assert len(saver.finish()) == int(in_background)
        if setup.rank == rank:
            HashingFile.write = full_after(3000)
        before = time.monotonic()
        try:
            saver.start(trained.contents(2))
            saver.finish()
        except RunError as error:
            return str(error), time.monotonic() - before
        return None


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_rank_is_every_rank_s_failure(tmp_path, rank, in_background):
    results = run_ranks(fails_on_ranks, 2, str(tmp_path), rank, in_background)
    final = step_directory(tmp_path, 2)
    for message, seconds in results:
        assert message == f"can't write checkpoint {final}: rank {rank}: OSError: [Errno 28] No space left on device"
        assert seconds < 10
    assert [one.name for one in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def trains_meanwhile(environment: Any, run: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[str]]:
    with a_setup(environment) as setup:
        trained = Trained(setup)
        saver = Saver(Path(run), settings(**{"async": True}), setup)
        paths: list[str] = []
        saved = {}
        for step in range(1, 6):
            paths += [one.name for one in saver.start(trained.contents(step))]
            saved = trained.tensors()
            # Collectives of another group, at the same time.
            for _ in range(20):
                setup.sum_on_host([1])
                trained.tensors()
            trained.take_step()
        paths += [one.name for one in saver.finish()]
        again = Trained(setup, steps=0)
        again.load(step_directory(Path(run), 5))
        return saved, again.tensors(), paths


def test_ranks_talk_in_both_threads_at_once(tmp_path):
    for saved, loaded, paths in run_ranks(trains_meanwhile, 2, str(tmp_path)):
        assert same(saved, loaded)
        assert paths == [f"step_{step:08d}" for step in range(1, 6)]
