"""Encoding in several real processes: the same store, whoever dies and whenever."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hp_core.data import parallel, writing
from hp_core.data.columns import RowColumns
from hp_core.data.fields import RowText
from hp_core.data.reading import Reading
from hp_core.data.records import Encoded, Row
from hp_core.data.text import TextEncoder
from hp_core.data.tokens import TokenStore, build_tokens
from hp_core.errors import ArgumentError, InputError, Problem, RunError
from hp_core.parallel.tiny import tiny_setup
from hp_core.testing.ranks import run_ranks
from tests.conftest import ROOT
from tests.data.helpers import CharTokenizer, ListSource, SlowTokenizer, text_encoder

TEXTS = [f"text {number}" * (number % 7) for number in range(60)]
BROKEN = 31


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "PAYS_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(writing, "_BATCH_ROWS", 4)


def files_of(store: TokenStore) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.directory.iterdir()}


def pids_in(log: Path) -> set[int]:
    return set(map(int, log.read_text().split())) if log.exists() else set()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + 15
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"still running: {pids}"
        time.sleep(0.05)


def test_any_number_of_processes_writes_the_same_files(tmp_path: Path) -> None:
    stores, pids = [], []
    for number in (1, 2, 3):
        log = tmp_path / f"log{number}"
        encoder = text_encoder(SlowTokenizer(seconds=0.02, log=str(log)))
        # Long enough for the others to take part.
        source = ListSource([*TEXTS, *(f"more {number}" for number in range(0 if number == 1 else 340))])
        stores.append(build_tokens(source, encoder, Reading(tmp_path / str(number), num_proc=number)))
        pids.append(pids_in(log))
    assert [len(one) for one in pids] == [1, 2, 3]
    assert os.getpid() in pids[0] & pids[1] & pids[2]
    assert files_of(stores[1]) == files_of(stores[2])
    assert stores[1].lengths[: len(TEXTS)].tolist() == stores[0].lengths.tolist()
    assert stores[1].places[:, 1].tolist() == list(range(1, 401))
    wait_until_gone(pids[2] - {os.getpid()})


class Gone:
    """Can be sent, and not be received."""

    def __reduce__(self) -> Any:
        return importlib.import_module, ("no_module_of_this_name",)


@pytest.mark.parametrize("extra", [lambda: None, Gone()], ids=["pickled", "loaded"])
def test_an_encoder_that_can_not_be_sent_is_used_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, extra: Any
) -> None:
    tokenizer = CharTokenizer()
    tokenizer.extra = extra  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        store = build_tokens(ListSource(TEXTS), text_encoder(tokenizer), Reading(tmp_path / "two", num_proc=2))
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("encoding in one process, because")
    expected = build_tokens(ListSource(TEXTS), text_encoder(CharTokenizer()), Reading(tmp_path / "one", num_proc=1))
    assert files_of(store) == files_of(expected)


@dataclass(frozen=True)
class FaultyEncoder(TextEncoder):
    """Does something at a text, in another process than `own`."""

    own: int = 0
    fault: str = ""

    def encode(self, rows: Sequence[Row]) -> list[Encoded | InputError]:
        time.sleep(0.02)
        if os.getpid() != self.own and self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if os.getpid() != self.own and self.fault == "prints":
            print("a library says something")
        if os.getpid() != self.own and self.fault == "raises":
            raise ZeroDivisionError("a fault of the encoder")
        if os.getpid() != self.own and self.fault == "refuses":
            raise ArgumentError("path", "can't be used", "use another")
        return super().encode(rows)


def faulty(fault: str) -> FaultyEncoder:
    return FaultyEncoder(CharTokenizer(), RowText.of(), RowColumns(), os.getpid(), fault)


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("killed", RunError, "a process that encodes the data was killed by SIGKILL; it may have been out of memory"),
        ("raises", RuntimeError, "in a process of its own:\n(.|\n)*ZeroDivisionError: a fault of the encoder"),
        ("refuses", ArgumentError, "path: can't be used; use another"),
    ],
)
def test_what_goes_wrong_in_a_process_is_told(tmp_path: Path, fault: str, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        build_tokens(ListSource(["text"] * 200), faulty(fault), Reading(tmp_path, num_proc=2))
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_what_a_library_prints_does_not_get_between(tmp_path: Path) -> None:
    source = ListSource(["text"] * 400)
    store = build_tokens(source, faulty("prints"), Reading(tmp_path / "two", num_proc=2))
    assert store.lengths.tolist() == [5] * 400


def test_faulty_rows_are_told_in_order(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(400)]
    for number in (150, 151, 390):
        texts[number] = "\ud800"
    said = []
    for num_proc in (1, 2):
        reading = Reading(tmp_path / str(num_proc), num_proc, "skip", max_errors=3)
        encoder = text_encoder(SlowTokenizer(seconds=0.01))
        store = build_tokens(ListSource(texts), encoder, reading)
        said.append(store.meta.faults)
        with pytest.raises(InputError, match=r"list:151: (.|\n)*list:152: (.|\n)*list:391: "):
            build_tokens(ListSource(texts), encoder, Reading(tmp_path / str(num_proc), num_proc))
        with pytest.raises(InputError, match="more faulty rows than the 2 of max_errors; the first:\nlist:151"):
            build_tokens(ListSource(texts), encoder, Reading(tmp_path / str(num_proc), num_proc, "skip", 2))
    assert said[0] == said[1]
    assert len(said[0]) == 3


def test_errors_arrive_whole() -> None:
    import pickle

    error = InputError([Problem("one", path="a", hint="b"), Problem("two")])
    assert pickle.loads(pickle.dumps(error)).problems == error.problems
    refused = pickle.loads(pickle.dumps(ArgumentError("path", "message", "hint")))
    assert (refused.path, refused.message, refused.hint) == ("path", "message", "hint")


# No main guard: what a user writes in a script.
SCRIPT = """\
import sys
from pathlib import Path
from hp_core.data import parallel, writing
from hp_core.data.reading import Reading
from hp_core.data.tokens import build_tokens
from tests.data.helpers import ListSource, SlowTokenizer, text_encoder
parallel.PAYS_AFTER_SECONDS = 0.0
writing._BATCH_ROWS = 4
folder = Path(sys.argv[1])
tokenizer = SlowTokenizer(seconds=float(sys.argv[2]), log=str(folder / "log"))
source = ListSource([f"text {n}" for n in range(400)])
store = build_tokens(source, text_encoder(tokenizer), Reading(folder, num_proc=3))
print("done", len(store.lengths))
"""


def script(folder: Path, seconds: float) -> subprocess.Popen[str]:
    path = folder / "script.py"
    path.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(path), str(folder), str(seconds)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_an_ended_run_leaves_no_process_and_the_next_one_builds(tmp_path: Path, ended_by: signal.Signals) -> None:
    log = tmp_path / "log"
    first = script(tmp_path, 0.2)
    deadline = time.monotonic() + 30
    while len(pids_in(log)) < 3:
        assert time.monotonic() < deadline
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(ended_by)
    first.communicate(timeout=20)
    assert first.returncode == -ended_by
    wait_until_gone(pids_in(log))
    assert not list(tmp_path.glob("*/meta.json")) or list(tmp_path.glob("*.tmp-*"))
    second = script(tmp_path, 0.001)
    stdout, stderr = second.communicate(timeout=60)
    assert (second.returncode, stdout) == (0, "done 400\n"), stderr
    assert not list(tmp_path.glob("*.tmp-*"))
    wait_until_gone(pids_in(log))


def build_in_rank(environment: Any, folder: str) -> tuple[str, int, list[int]]:
    parallel.PAYS_AFTER_SECONDS = 0.0
    writing._BATCH_ROWS = 4
    encoder = text_encoder(SlowTokenizer(seconds=0.02, log=f"{folder}/log"))
    source = ListSource([f"text {number}" for number in range(400)])
    with tiny_setup(environment) as setup:
        store = build_tokens(source, encoder, Reading(Path(folder), num_proc=2))
        assert setup.sum_on_host([1]) == [2]
    return store.key, source.passes, store.lengths.tolist()


def test_ranks_build_one_store_together(tmp_path: Path) -> None:
    first, second = run_ranks(build_in_rank, 2, str(tmp_path))
    assert first[0] == second[0]
    assert first[2] == second[2]
    assert first[1] + second[1] == 1
    assert len(pids_in(tmp_path / "log")) == 2
