"""The history of CUDA's allocator: when it is kept, and that no half of a file has its name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hp_core.config.profiler import ProfilerConfig
from hp_core.training import profiling
from hp_core.training.profiling import Profiling


@dataclass
class Said:
    lines: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the allocator, in order."""
    found: list[str] = []

    def record(enabled: Any = "all", max_entries: int = 0) -> None:
        found.append("off" if enabled is None else "on")

    def dump(path: str) -> None:
        found.append(f"dump {Path(path).name}")
        Path(path).write_bytes(b"history")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    return found


def a_run(folder: Path) -> Any:
    setup = SimpleNamespace(rank=0, device=torch.device("cpu"))
    return SimpleNamespace(
        state=SimpleNamespace(step=0), setup=setup, directory=SimpleNamespace(path=folder), console=Said()
    )


def test_the_history_is_kept_for_the_steps_alone_and_written_whole(tmp_path, calls):
    run, hooks = a_run(tmp_path), Profiling(ProfilerConfig(start_step=2, stop_step=3, memory_snapshot=True))
    hooks.on_train_start(run)
    for step in (1, 2, 3, 4):
        calls.append(f"step {step}")
        run.state.step = step
        hooks.on_step_end(run, step)
    assert calls == [
        *("step 1", "on", "step 2", "step 3"),
        *("dump .writing-rank0.steps2-3.memory.pickle", "off", "step 4"),
    ]
    assert (tmp_path / "profile" / "rank0.steps2-3.memory.pickle").read_bytes() == b"history"
    assert not list((tmp_path / "profile").glob(".*"))


def test_a_failure_leaves_the_history_that_explains_it(tmp_path, calls):
    run, hooks = a_run(tmp_path), Profiling(ProfilerConfig(start_step=1, stop_step=3, memory_snapshot=True))
    hooks.on_train_start(run)
    run.state.step = 1
    hooks.on_step_end(run, 1)
    run.state.step = 2
    hooks.on_exception(run)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank0.steps1-2.memory.pickle"]
    assert calls[-1] == "off"
    assert run.console.lines == []


def test_a_history_that_can_t_be_written_hides_no_failure(tmp_path, calls, monkeypatch):
    run, hooks = a_run(tmp_path), Profiling(ProfilerConfig(start_step=1, memory_snapshot=True))
    hooks.on_train_start(run)
    monkeypatch.setattr(profiling, "_whole", lambda path, write: (_ for _ in ()).throw(OSError("no space left")))
    hooks.on_exception(run)
    assert run.console.lines == ["profiler: OSError: no space left"]
    assert calls == ["on", "off"]


def test_a_write_that_is_broken_off_leaves_no_file_of_that_name(tmp_path):
    def write(path: Path) -> None:
        path.write_text("half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        profiling._whole(tmp_path / "profile" / "rank0.step1.txt", write)
    assert not (tmp_path / "profile" / "rank0.step1.txt").exists()
