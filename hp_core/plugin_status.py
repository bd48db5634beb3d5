"""The state of what is installed under `hp.*` groups: looked up without importing, or imported in a child process."""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from typing import Any

from hp_core.components import GROUPS
from hp_core.entry_points import Entry, EntryLoadError, clash_hint, describe
from hp_core.spelling import did_you_mean

PLUGIN_GROUP = "hp.plugins"
KNOWN_GROUPS = (*(group.name for group in GROUPS), PLUGIN_GROUP)
NOT_LOADED = "ok (not loaded)"
LOADED = "ok"

# A child that reports nothing for this long is taken to hang in the import at hand.
SILENCE_LIMIT_S = 120.0


@dataclass(frozen=True)
class Row:
    """One installed component or plugin and its state; `hooks` are known only of a plugin that was loaded."""

    group: str
    name: str
    value: str
    distribution: str
    version: str
    status: str
    hooks: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether a recipe can name this row as far as is known."""
        return self.status in (NOT_LOADED, LOADED)


def status_rows(entries: Sequence[Entry], *, load: bool = False, limit_s: float = SILENCE_LIMIT_S) -> tuple[Row, ...]:
    """Return a row for each entry, in the order given.

    Without `load` nothing is imported: a row is "ok (not loaded)" when its module's file is there. With `load`
    each is imported in a child process and is "ok" or "broken: …"; one that ends or hangs the child is broken too.
    """
    reports = _load_all(entries, limit_s) if load else _look_up_all(entries)
    namesakes: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        namesakes.setdefault((entry.group, entry.name), []).append(entry)
    rows = []
    for entry in entries:
        report = reports[entry]
        status = _misuse(entry, namesakes[entry.group, entry.name]) or report["status"]
        rows.append(Row(**asdict(entry), status=status, hooks=tuple(report.get("hooks", ()))))
    return tuple(rows)


def _misuse(entry: Entry, same: Sequence[Entry]) -> str:
    """Return what is wrong with an entry's group or name, or an empty text; `same` are all that share both."""
    if entry.group not in KNOWN_GROUPS:
        return f"unknown group: nothing reads it; {did_you_mean(entry.group, KNOWN_GROUPS)}".rstrip("; ")
    if len(same) == 1:
        return ""
    if all(one.distribution == entry.distribution for one in same):
        return f"clash: {entry.distribution} offers this name {len(same)} times"
    others = ", ".join(dict.fromkeys(one.distribution for one in same if one.distribution != entry.distribution))
    return f"clash: also offered by {others}; {clash_hint([entry])}"


def _look_up_all(entries: Sequence[Entry]) -> dict[Entry, Mapping[str, Any]]:
    missing = {module: _missing_module(module) for module in {entry.module for entry in entries}}
    reports: dict[Entry, Mapping[str, Any]] = {}
    for entry in entries:
        name = missing[entry.module]
        reports[entry] = {"status": f"missing module: {name}" if name else NOT_LOADED}
    return reports


def _missing_module(module: str) -> str:
    """Return the first part of a dotted module name that can't be found, or an empty text. Runs no module's code."""
    if module in sys.modules:
        return ""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
        name, places = top, _places(spec)
        for part in rest if spec is not None else ():
            name = f"{name}.{part}"
            # `importlib.util.find_spec` would import the parents of a dotted name.
            specs = [one for one in (_find_in(place, name) for place in places) if one is not None]
            # As in an import, a module or package goes before the parts of a namespace package.
            spec = next((one for one in specs if one.loader is not None), specs[0] if specs else None)
            if spec is None:
                break
            places = _places(spec) if spec.loader is not None else [place for one in specs for place in _places(one)]
        return "" if spec is not None else name
    except (ImportError, ValueError, OSError):
        return module or "(none named)"


def _find_in(place: str, name: str) -> ModuleSpec | None:
    finder = pkgutil.get_importer(place)
    return finder.find_spec(name) if finder is not None else None


def _places(spec: ModuleSpec | None) -> list[str]:
    return list(spec.submodule_search_locations or ()) if spec is not None else []


def _load_all(entries: Sequence[Entry], limit_s: float) -> dict[Entry, Mapping[str, Any]]:
    """Load every entry in child processes, a new one after each that dies."""
    reports: dict[Entry, Mapping[str, Any]] = {}
    waiting = list(entries)
    while waiting:
        lines, ending = _child(waiting, limit_s)
        if not lines:  # blamed only when it was the first to be loaded, so that nothing else can be the cause
            lines = [{"status": f"broken: {ending}"}]
        reports.update(zip(waiting, lines, strict=False))
        waiting = waiting[len(lines) :]
    return reports


def _child(entries: Sequence[Entry], limit_s: float) -> tuple[list[dict[str, Any]], str]:
    """Return what a child could report about the first entries, and how it ended."""
    command = [sys.executable, "-c", "from hp_core.plugin_status import report_loads; report_loads()"]
    request = json.dumps({"path": sys.path, "entries": [asdict(entry) for entry in entries]})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(
            command, input=request.encode(), stdout=subprocess.PIPE, timeout=limit_s, env=environment, check=False
        )
        output, ending = done.stdout, f"the import ended the process with exit code {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output, ending = error.output or b"", f"the import took longer than {limit_s:g} s"
    return [json.loads(line) for line in output.splitlines(keepends=True) if line.endswith(b"\n")], ending


def report_loads() -> None:
    """Load the entries that standard input lists and write one JSON line for each; the child's side of `_child`."""
    request = json.loads(sys.stdin.buffer.read())
    sys.path[:] = request["path"]
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as reports:
        # What plugins print while they are imported belongs to nobody.
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        for fields in request["entries"]:
            print(json.dumps(_load(Entry(**fields))), file=reports, flush=True)


def _load(entry: Entry) -> dict[str, Any]:
    try:
        loaded = entry.load()
    except EntryLoadError as error:
        return {"status": f"broken: {describe(error.cause)}"}
    if entry.group != PLUGIN_GROUP:
        return {"status": LOADED}
    from hp_core.plugin_check import check_plugin, check_requirement

    unmet = check_requirement(entry.distribution)
    functions, problems = check_plugin(loaded)
    problems = (unmet,) if unmet is not None else problems
    if problems:
        return {"status": "broken: " + "; ".join(str(problem) for problem in problems)}
    return {"status": LOADED, "hooks": [function.hook.name for function in functions]}
