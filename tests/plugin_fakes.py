"""Fake plugins, installed or refused, for the tests of everything that loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hp_core.errors import EXIT_USER_INPUT, InputError
from hp_core.hookspecs import hookimpl
from hp_core.plugins import Plugins, load_plugins
from tests.fakes import install

HEADER = "from hp_core.hookspecs import hookimpl\n"
BUILD_LOSS = "@hookimpl\ndef build_loss(config):\n    return 1\n"


def plugin(site: Path, name: str, source: str, number: str = "1.0", **options: Any) -> None:
    """Install the distribution `<name>-dist`, whose plugin `name` is the module `fake_<name>`."""
    entry_points = {"hp.plugins": {name: f"fake_{name}"}}
    modules = {f"fake_{name}": HEADER + source}
    install(site, f"{name}-dist", number, entry_points=entry_points, modules=modules, **options)


def load(names: list[str], site: Path, **options: Any) -> Plugins:
    return load_plugins(names, base_dir=site, **options)


def refuse(names: list[str], site: Path, **options: Any) -> list[str]:
    with pytest.raises(InputError) as error:
        load(names, site, **options)
    assert error.value.exit_code == EXIT_USER_INPUT
    return [str(problem) for problem in error.value.problems]


class Defaults:
    @hookimpl(trylast=True)
    def build_loss(self, config: Any) -> Any:
        return f"default loss of {config}"

    @hookimpl
    def on_step_end(self, run: Any, step: Any) -> None:
        run.append("default")
