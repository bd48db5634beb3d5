"""Fake installed distributions: real metadata directories and modules on a `sys.path` of the test's own."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest

REPOSITORY = Path(__file__).parents[1]


def install(
    site: Path,
    name: str,
    version: str = "1.0",
    *,
    entry_points: Mapping[str, Mapping[str, str]] | str,
    modules: Mapping[str, str] | None = None,
    requires: tuple[str, ...] = (),
) -> None:
    """Write a distribution into `site` as pip would."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata + "".join(f"Requires-Dist: {line}\n" for line in requires))
    (info / "entry_points.txt").write_text(
        entry_points if isinstance(entry_points, str) else _entry_points(entry_points)
    )
    (info / "RECORD").write_text("")
    for module, source in (modules or {}).items():
        write_module(site, module, source)


def install_source_tree(site: Path, name: str, version: str, *, entry_points: Mapping[str, Mapping[str, str]]) -> None:
    """Write the egg-info that a build leaves in a source tree."""
    info = site / f"{name.replace('-', '_')}.egg-info"
    info.mkdir(parents=True)
    (info / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(_entry_points(entry_points))


def write_module(site: Path, module: str, source: str) -> Path:
    path = site.joinpath(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(source))
    return path


@contextmanager
def on_path(*sites: Path) -> Iterator[None]:
    """Put the sites on `sys.path`, first one first, and forget afterwards what was imported from them."""
    with pytest.MonkeyPatch.context() as patch:
        for site in reversed(sites):
            patch.syspath_prepend(str(site))
        importlib.invalidate_caches()
        before = set(sys.modules)
        try:
            yield
        finally:
            for name in set(sys.modules) - before:
                file = getattr(sys.modules[name], "__file__", None) or ""
                if any(file.startswith(str(site)) for site in sites):
                    del sys.modules[name]


def environment(*sites: Path) -> dict[str, str]:
    """Return an environment for a child process that sees the sites and this repository."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*sites, REPOSITORY)))}


def _entry_points(groups: Mapping[str, Mapping[str, str]]) -> str:
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
    return "\n".join(lines)
