"""Settings for every test: no hub, no progress bars, and a cache of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Speed is for benchmarks: on a machine with other work a test takes as long as it takes.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout: examples, docs and README lie here."""
    return ROOT


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> None:
    if "HP_CACHE_DIR" not in os.environ:
        os.environ["HP_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _forget_modules_of_temporary_folders() -> Iterator[None]:
    """A module that one test wrote must not be what the next one imports under the same name."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        module = sys.modules[name]
        if type(module) is not ModuleType:
            continue
        # A namespace package has no file, only folders.
        places = [getattr(module, "__file__", None) or "", *(getattr(module, "__path__", None) or ())]
        if any("pytest-of-" in place for place in places):
            del sys.modules[name]
