"""`--matrix`: every family on every layout, and a table of how far each is from one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.equivalence.matrix import HEADER, LAYOUTS, ROW, recorded

MODULE = "test_matrix.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("equivalence")
    group.addoption("--matrix", action="store_true", help="run every family on every layout and show the differences")
    group.addoption("--record", metavar="FILE", help="with --matrix: write the differences into the table of this file")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record") and not config.getoption("matrix"):
        raise pytest.UsageError("--record needs --matrix")
    if config.getoption("matrix"):
        config.option.markexpr = ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Where the tests are started from their root, this file is read after the options are.
    if not config.getoption("matrix", False):
        return
    cells = [item for item in items if item.path.name == MODULE and "layout" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=[item for item in items if item not in cells])
    items[:] = cells


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("matrix", False):
        return
    reports = [one for kind in ("passed", "failed") for one in terminalreporter.getreports(kind) if one.when == "call"]
    found = {value[0]: tuple(value) for one in reports for name, value in one.user_properties if name == ROW}
    table = [found[layout] for layout in LAYOUTS if layout in found]
    terminalreporter.section("differences to one process: loss, gradients (absolute, relative), norm, steps, weights")
    for line in aligned(table):
        terminalreporter.write_line(line)
    path = config.getoption("record")
    if path and terminalreporter.getreports("failed"):
        terminalreporter.write_line(f"{path} is left as it was: a layout failed")
    elif path:
        file = Path(path)
        file.write_text(recorded(file.read_text(encoding="utf-8"), table), encoding="utf-8")
        terminalreporter.write_line(f"recorded {len(table)} layouts in {path}")


def aligned(table: list[tuple[str, ...]]) -> list[str]:
    """The table's lines in columns."""
    lines = [HEADER, *table]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
