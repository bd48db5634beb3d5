"""An export takes the memory of about one file of weights, not that of the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.e2e.runs import hp_train_here, recipe

MEASURE = """\
import resource, sys
from pathlib import Path
from hp_core.export.export import export_checkpoint

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

small, large, out = map(Path, sys.argv[1:])
export_checkpoint(small, out / "small")
before = peak()
done = export_checkpoint(large, out / "large", max_shard_bytes=40_000_000)
print(done.num_bytes, done.num_files, peak() - before)
"""
LARGE = (
    *("--model.config.hidden_size=1024", "--model.config.intermediate_size=4096", "--model.config.num_hidden_layers=5"),
    *("--model.config.vocab_size=4000", "--training.train_iters=1", "--optimizer={name: sgd, lr: 0.1, momentum: 0}"),
)


def test_memory_is_bounded_by_a_file_and_not_by_the_model(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    for name, options in (("small", ("--training.train_iters=1",)), ("large", LARGE)):
        done = hp_train_here(str(path), f"--output_dir={tmp_path / name}", *options)
        assert done.returncode == 0, done.stderr
    command = [sys.executable, "-c", MEASURE, *(str(tmp_path / name) for name in ("small", "large", "out"))]
    measured = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    num_bytes, num_files, growth = map(int, measured.stdout.split())
    assert num_bytes > 280_000_000
    assert num_files >= 7
    # A file being filled and the tensor that is read for it, twice where it is converted.
    assert growth < 140_000_000
    assert len(list((tmp_path / "out" / "large").glob("*.safetensors"))) == num_files
