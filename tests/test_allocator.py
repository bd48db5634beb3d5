"""The C allocator's memory is kept between steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROGRAM = """\
import json, resource, sys
from hp_core.allocator import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else None
import torch

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(16 << 20)  # 64 MiB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(json.dumps([kept, faults()]))
"""


def run(how: str, **variables: str) -> list[object]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], env={**environment, **variables}, capture_output=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_what_is_freed_is_not_asked_of_the_system_again() -> None:
    (_, usual), (kept, faults) = run("leave"), run("keep")
    assert kept is True
    assert usual > 8 * 1000  # pages of 4 KiB, or fewer of more
    # Something small may settle in what is free, so that a block is asked for once more.
    assert faults < usual / 3


def test_the_environment_has_the_last_word() -> None:
    kept, faults = run("keep", MALLOC_MMAP_THRESHOLD_="65536")
    assert kept is False
    assert faults > 8 * 1000


HUGE = """\
import re
from pathlib import Path
from hp_core.allocator import keep_freed_memory

assert keep_freed_memory()
assert keep_freed_memory()  # a second run in one process
import torch

kept = torch.ones(16 << 20)
found = re.findall(r"^AnonHugePages: +(\\d+) kB$", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
print(sum(map(int, found)))
"""


@pytest.mark.skipif(not THP.exists() or "[never]" in THP.read_text(), reason="the system has no huge pages")
def test_what_is_kept_is_made_of_huge_pages() -> None:
    done = subprocess.run([sys.executable, "-c", HUGE], capture_output=True, check=True, text=True)
    assert int(done.stdout) >= 32 << 10  # of 64 MiB, where memory in one piece may be rare
