from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from hp_core.data.cache import build_once, cache_directory
from hp_core.errors import InputError, RunError


def has_result(directory: Path) -> bool:
    return (directory / "result").is_file()


def build_slowly(cache_dir: Path, log: Path) -> None:
    def write(directory: Path) -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        (directory / "result").write_text("done")

    build_once(cache_dir, "key", write, is_complete=has_result)


def build_forever(cache_dir: Path, log: Path) -> None:
    def write(directory: Path) -> None:
        (directory / "result").write_text("half")
        log.write_text("started")
        time.sleep(60)

    build_once(cache_dir, "key", write, is_complete=has_result)


def test_processes_at_once_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    cache_dir, log = tmp_path / "cache", tmp_path / "log"
    processes = [context.Process(target=build_slowly, args=(cache_dir, log)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    assert len(log.read_text().splitlines()) == 1
    assert (cache_dir / "key" / "result").read_text() == "done"


def test_a_killed_build_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    cache_dir, log = tmp_path / "cache", tmp_path / "log"
    process = context.Process(target=build_forever, args=(cache_dir, log))
    process.start()
    deadline = time.monotonic() + 20
    while not log.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(20)
    assert not (cache_dir / "key").exists()
    assert len(list(cache_dir.glob("key.tmp-*"))) == 1

    build_slowly(cache_dir, log)
    assert (cache_dir / "key" / "result").read_text() == "done"
    assert list(cache_dir.glob("key.tmp-*")) == []


def test_a_failed_build_is_cleaned_up_and_can_be_tried_again(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "result").write_text("half")
        raise InputError("line 3 is broken")

    with pytest.raises(InputError, match="line 3"):
        build_once(tmp_path, "key", fail, is_complete=has_result)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []
    build_slowly(tmp_path, tmp_path / "log")
    assert has_result(tmp_path / "key")


def test_a_full_disk_is_a_run_error_with_the_place(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match=r"No space left on device") as caught:
        build_once(tmp_path, "key", fail, is_complete=has_result)
    assert str(tmp_path) in str(caught.value)


def test_a_cache_that_can_not_be_made_says_which_setting_to_change(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="HP_CACHE_DIR"):
        build_once(tmp_path / "file" / "cache", "key", lambda path: None, is_complete=has_result)


def test_a_finished_result_is_not_written_again_and_a_damaged_one_is(tmp_path: Path) -> None:
    build_slowly(tmp_path, tmp_path / "log")
    build_slowly(tmp_path, tmp_path / "log")
    assert len((tmp_path / "log").read_text().splitlines()) == 1
    (tmp_path / "key" / "result").unlink()
    build_slowly(tmp_path, tmp_path / "log")
    assert has_result(tmp_path / "key")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("HP_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory() == Path("/home/somebody/.cache/hyperparallel")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory() == Path("/xdg/hyperparallel")
    monkeypatch.setenv("HP_CACHE_DIR", "/hp")
    assert cache_directory() == Path("/hp")
    assert cache_directory("~/mine") == Path("/home/somebody/mine")
