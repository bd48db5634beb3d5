from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hp_core.entry_points import Entry, scan
from hp_core.plugin_status import Row, status_rows
from hp_core.plugins import InstalledPlugins
from tests.fakes import install, on_path

HEADER = "from hp_core.hookspecs import hookimpl\n"
GOOD = HEADER + "@hookimpl\ndef build_loss(config):\n    return 1\n@hookimpl\ndef on_plan(plan):\n    pass\n"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "site"
    path.mkdir()
    with on_path(path):
        yield path


def offer(site: Path, group: str, **modules: str) -> list[Entry]:
    """Install one distribution for each module and return the entries in name order."""
    for name, source in modules.items():
        install(
            site,
            f"{name}-dist",
            entry_points={group: {name: f"fake_{name}:thing" if group != "hp.plugins" else f"fake_{name}"}},
            modules={f"fake_{name}": source},
        )
    return [entry for entry in scan().entries if entry.name in modules]


def states(rows: tuple[Row, ...]) -> dict[str, str]:
    return {row.name: row.status for row in rows}


def test_without_loading_only_the_modules_file_is_looked_for(site: Path) -> None:
    offer(site, "hp.losses", present="raise RuntimeError('imported')")
    install(
        site,
        "pkg",
        entry_points={
            "hp.losses": {
                "deep": "fake_pkg.sub.mod:x",
                "no_top": "fake_nowhere.mod:x",
                "no_middle": "fake_pkg.other.mod:x",
                "no_leaf": "fake_pkg.sub.gone:x",
                "not_a_package": "fake_pkg.sub.mod.more:x",
                "builtin": "sys:path",
                "frozen_parent": "os.path:join",
                "nonsense": ":x",
            }
        },
        modules={"fake_pkg.__init__": "raise RuntimeError('imported')", "fake_pkg.sub.mod": "raise RuntimeError"},
    )
    entries = [entry for entry in scan().entries if entry.distribution in ("pkg", "present-dist")]
    assert states(status_rows(entries)) == {
        "present": "ok (not loaded)",
        "deep": "ok (not loaded)",
        "no_top": "missing module: fake_nowhere",
        "no_middle": "missing module: fake_pkg.other",
        "no_leaf": "missing module: fake_pkg.sub.gone",
        "not_a_package": "missing module: fake_pkg.sub.mod.more",
        "builtin": "ok (not loaded)",
        "frozen_parent": "ok (not loaded)",
        "nonsense": "missing module: (none named)",
    }
    assert not {"fake_present", "fake_pkg"} & set(sys.modules)


def test_loading_tells_what_works_and_what_is_broken_and_why(site: Path) -> None:
    entries = offer(
        site,
        "hp.losses",
        a_good="print('noise on import')\nthing = 1",
        b_import="import nowhere_at_all",
        c_attribute="things = 1",
        d_exit="import sys; sys.exit(3)",
        e_good="import os, sys; os.write(1, b'raw noise\\n'); sys.stderr.write('noise'); thing = 1",
    )
    rows = status_rows(entries, load=True)
    assert states(rows) == {
        "a_good": "ok",
        "b_import": "broken: ModuleNotFoundError: No module named 'nowhere_at_all'",
        "c_attribute": "broken: AttributeError: module 'fake_c_attribute' has no attribute 'thing'",
        "d_exit": "broken: SystemExit: 3",
        "e_good": "ok",
    }
    assert [row.usable for row in rows] == [True, False, False, False, True]
    assert not [name for name in sys.modules if name.startswith("fake_")]


def test_an_import_that_kills_or_hangs_the_process_is_blamed_alone(site: Path) -> None:
    entries = offer(
        site,
        "hp.losses",
        a_good="thing = 1",
        b_dies="import os; os._exit(7)",
        c_good="thing = 1",
        d_hangs="import time; time.sleep(60)",
        e_good="thing = 1",
    )
    assert states(status_rows(entries, load=True, limit_s=1.5)) == {
        "a_good": "ok",
        "b_dies": "broken: the import ended the process with exit code 7",
        "c_good": "ok",
        "d_hangs": "broken: the import took longer than 1.5 s",
        "e_good": "ok",
    }


def test_a_loaded_plugin_is_checked_and_lists_its_hooks(site: Path) -> None:
    offer(
        site,
        "hp.plugins",
        good=GOOD,
        misspelt=HEADER + "@hookimpl\ndef bild_loss(config): pass\n@hookimpl\ndef on_plam(plan): pass\n",
        undecorated="def build_loss(config): pass\n",
    )
    installed = InstalledPlugins.discover()
    rows = {row.name: row for row in installed.statuses()}
    assert rows["good"].status == "ok"
    assert rows["good"].hooks == ("build_loss", "on_plan")
    assert rows["misspelt"].status.count("is no hook of") == 2
    assert "did you mean 'build_loss'?" in rows["misspelt"].status
    assert rows["undecorated"].status.startswith("broken: the function 'build_loss' is named like a hook")


def test_a_clash_is_a_status_of_both_rows(site: Path) -> None:
    for owner in ("acme", "zeta"):
        install(site, owner, entry_points={"hp.losses": {"focal": "sys:path"}})
    install(site, "twice", entry_points="[hp.optimizers]\nlion = sys:path\nlion = sys:argv\n")
    entries = [entry for entry in scan().entries if entry.distribution in ("acme", "zeta", "twice")]
    for load in (False, True):
        assert [row.status for row in status_rows(entries, load=load)] == [
            "clash: also offered by zeta; write 'acme:focal'",
            "clash: also offered by acme; write 'zeta:focal'",
            "clash: twice offers this name 2 times",
            "clash: twice offers this name 2 times",
        ]


def test_a_group_that_nothing_reads_is_pointed_out(site: Path) -> None:
    install(site, "acme", entry_points={"hp.loss": {"focal": "sys:path"}, "hp.zzz": {"focal": "sys:path"}})
    entries = [entry for entry in scan().entries if entry.distribution == "acme"]
    assert [row.status for row in status_rows(entries)] == [
        "unknown group: nothing reads it; did you mean 'hp.losses'?",
        "unknown group: nothing reads it",
    ]


def test_nothing_installed_is_no_rows() -> None:
    assert status_rows([]) == status_rows([], load=True) == ()
