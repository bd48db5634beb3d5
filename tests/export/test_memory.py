"""An export takes the memory of about one file of weights, not that of the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.e2e.runs import hp_train_here, recipe

MEASURE = """\
import re, sys
from pathlib import Path
from hp_core.export.export import export_checkpoint

def peak():
    # Not ru_maxrss, which a child process has from its parent.
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1))

small, large, out = map(Path, sys.argv[1:4])
export_checkpoint(small, out / "small")
before = peak()
done = export_checkpoint(large, out / "large", max_shard_bytes=int(sys.argv[4]))
print(done.num_bytes, done.num_files, peak() - before)
"""
LARGE = (
    *("--model.config.hidden_size=1024", "--model.config.intermediate_size=4096", "--model.config.num_hidden_layers=5"),
    *("--model.config.vocab_size=4000", "--training.train_iters=1", "--optimizer={name: sgd, lr: 0.1, momentum: 0}"),
)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the peak of resident memory")
def test_memory_is_bounded_by_a_file_and_not_by_the_model(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    for name, options in (("small", ("--training.train_iters=1",)), ("large", LARGE)):
        done = hp_train_here(str(path), f"--output_dir={tmp_path / name}", *options)
        assert done.returncode == 0, done.stderr
    num_bytes, num_files, growth = measured(tmp_path, 40_000_000)
    assert num_bytes > 280_000_000
    assert num_files >= 7
    # A file that is being filled, and the tensor that is read for it.
    assert growth < 140_000_000
    # That it can tell is part of the test: one file of everything takes the memory of everything.
    assert measured(tmp_path, 10**9)[2] > 250_000_000


def measured(folder: Path, max_shard_bytes: int) -> list[int]:
    """Bytes and files of an export, and what it adds to the peak of a process that has exported a small model."""
    out = folder / str(max_shard_bytes)
    command = [
        sys.executable,
        "-c",
        MEASURE,
        str(folder / "small"),
        str(folder / "large"),
        str(out),
        str(max_shard_bytes),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [int(number) for number in done.stdout.split()]
