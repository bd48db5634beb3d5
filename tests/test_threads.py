from __future__ import annotations

import subprocess
import sys
import time

from tests.conftest import ROOT

# Native code that calls back into python all the time, as readers of data do.
_AT_WORK = """
import atexit, time, torch
from hp_core.threads import LooseThread, leave

def work():
    while True:
        torch.randn(300, 300) @ torch.randn(300, 300)

LooseThread(work, "reading").start()
time.sleep(0.5)
atexit.register(print, "told at the end")
leave(75)
"""


def test_a_process_ends_with_its_code_while_a_loose_thread_is_at_work():
    done = subprocess.run(
        [sys.executable, "-c", _AT_WORK], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (75, "told at the end\n", "")


_UPLOADS = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
from hp_core.threads import LooseThread, leave

LooseThread(lambda: time.sleep(60), "reading").start()
ThreadPoolExecutor(1).submit(lambda: (time.sleep(0.5), print("uploaded by a pool")))
threading.Thread(target=lambda: (time.sleep(1), print("uploaded"))).start()
leave(75)
"""


def test_what_others_still_do_is_done_before():
    done = subprocess.run(
        [sys.executable, "-c", _UPLOADS], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (75, "uploaded by a pool\nuploaded\n", "")


# A user's own script, which knows nothing of `leave`, and a thread that is about to find nothing more to do.
_A_SCRIPT = """
import time, torch
from hp_core.threads import LooseThread

def work():
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        torch.randn(300, 300) @ torch.randn(300, 300)

LooseThread(work, "reading").start()
print("done")
"""


def test_a_script_of_another_kind_waits_for_what_it_leaves_behind():
    done = subprocess.run(
        [sys.executable, "-c", _A_SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# Left open, and idle.
_A_READER = """
from hp_plugins.dataloaders.ahead import each_ahead

results = each_ahead(range(9), lambda job: job, 2)
print(next(results))
"""


def test_a_script_that_leaves_a_reader_open_ends_at_once():
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _A_READER], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
    assert time.monotonic() - began < 5
