"""How the processes of a run end when all is done."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.runs import hp_train, recipe

# Native code that takes python's lock all the time, as threads of gloo do when they let go of a tensor.
BUSY = """
import threading

import torch

from hp_core import hookimpl


def work():
    while True:
        torch.randn(200, 200) @ torch.randn(200, 200)


@hookimpl
def on_train_end(run):
    threading.Thread(target=work, daemon=True).start()
"""


def test_ranks_end_well_while_native_code_is_at_work(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(BUSY)
    done = hp_train(str(recipe(tmp_path)), "-p", str(tmp_path / "busy.py"), "--nproc", "2")
    assert (done.returncode, done.stderr) == (0, "")
