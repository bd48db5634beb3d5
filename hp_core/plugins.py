"""The plugins that a recipe lists: found, checked all together, and activated in a manager of their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from hp_core import hookspecs
from hp_core.entry_points import Entry, EntryLoadError, choose, scan, spellings
from hp_core.errors import InputError, Origin, Problem
from hp_core.hooks import hooks
from hp_core.plugin_check import HookFunction, check_plugin, check_requirement
from hp_core.plugin_file import find_file, is_path, load_file
from hp_core.plugin_guard import GuardedPlugin

if TYPE_CHECKING:
    from hp_core.components import Component
    from hp_core.plugin_status import Row

GROUP = "hp.plugins"
_LISTED = re.compile(r"plugins\[(\d+)\]")


@dataclass(frozen=True)
class PluginRecord:
    """What took part in a run under one name of the recipe's `plugins` list.

    `source` is the entry point's value or the path of a one-file plugin; only the latter has a `sha256`, and only
    the former a distribution and version. `hooks` are the names it implements, in call order.
    """

    name: str
    distribution: str | None
    version: str | None
    source: str
    hooks: tuple[str, ...]
    sha256: str | None = None

    @property
    def key(self) -> str:
        """What it is called wherever it lies: `package:name`, or the name of a one-file plugin's file."""
        return f"{self.distribution}:{self.name}" if self.is_installed else Path(self.source).name

    @property
    def is_installed(self) -> bool:
        """Whether it comes with a distribution, and isn't a file."""
        return self.distribution is not None

    def __str__(self) -> str:
        origin = self.source if self.distribution is None else f"{self.distribution} {self.version}"
        return f"plugin {self.name!r} ({origin})"


@dataclass(frozen=True)
class Plugins:
    """The active plugins of one run.

    `hook` calls them: `plugins.hook.build_loss(config=config)`. A call that doesn't give exactly the hook's
    arguments is a `TypeError`.
    """

    hook: pluggy.HookRelay
    records: tuple[PluginRecord, ...]

    def of_each(self, hook: str) -> dict[str, Callable[..., Any]]:
        """Each plugin's own implementation of a hook, by `PluginRecord.key` in the recipe's order.

        Of several files with one name, each has its content's hash behind it.

        Called with the hook's arguments by name; for hooks that concern each plugin by itself.
        """
        caller: pluggy.HookCaller = getattr(self.hook, hook)
        found: dict[int, pluggy.HookImpl] = {}
        for one in caller.get_hookimpls():
            place = _LISTED.fullmatch(one.plugin_name)
            if place is not None:
                found[int(place.group(1))] = one
        return {self._key(index): partial(_call_one, found[index]) for index in sorted(found)}

    def _key(self, index: int) -> str:
        key = self.records[index].key
        if sum(one.key == key for one in self.records) == 1:
            return key
        # Not by their order, which may change between runs.
        return f"{key} ({(self.records[index].sha256 or '')[:12]})"


class InstalledPlugins:
    """The hook plugins that installed distributions offer, or those a test puts together. Immutable."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = tuple(sorted(set(entries)))

    @classmethod
    def discover(cls) -> InstalledPlugins:
        """Read the installed distributions' entry points; imports nothing and doesn't depend on their order."""
        return cls(entry for entry in scan().entries if entry.group == GROUP)

    def all(self) -> tuple[Entry, ...]:
        """Return every plugin, sorted by name and distribution."""
        return self._entries

    def names(self) -> tuple[str, ...]:
        """Return the names as a recipe may write them, sorted."""
        return spellings(self._entries)

    def find(self, name: str) -> Entry:
        """Return the plugin called `name` or `package:name`. Raises `InputError` when there isn't exactly one."""
        try:
            return choose(self._entries, name, "plugin")
        except InputError as error:
            advice = "a plugin comes with a package: pip install it, or give the path of a .py file"
            is_known = ":" in name or any(entry.name == name for entry in self._entries)
            raise InputError(
                one if is_known else replace(one, hint=f"{one.hint}; {advice}") for one in error.problems
            ) from None

    def statuses(self) -> tuple[Row, ...]:
        """Import each plugin in a child process and say whether it works: "ok" or "broken: …"."""
        from hp_core.plugin_status import status_rows

        return status_rows(self._entries, load=True)


def load_plugins(
    names: Sequence[str],
    *,
    base_dir: Path,
    origins: Mapping[str, Origin] | None = None,
    defaults: Sequence[object] = (),
    installed: InstalledPlugins | None = None,
) -> Plugins:
    """Load the plugins that a recipe lists, in its order.

    Args:
        names: entry-point names, `package:name`, or paths of one-file plugins relative to `base_dir`.
        base_dir: the recipe's directory.
        origins: where each item was written, by recipe path (`plugins[0]`).
        defaults: objects with core's own implementations; any plugin's result comes before theirs.
        installed: what is installed; discovered when left out.

    Raises `InputError` with the problems of all the plugins.
    """
    installed = InstalledPlugins.discover() if installed is None else installed
    candidates: list[_Candidate] = []
    found: list[tuple[int, Problem]] = []
    for index, name in enumerate(names):
        try:
            candidates.append(_load(index, name, base_dir, installed, candidates))
        except InputError as error:
            found += [(index, problem) for problem in error.problems]
    found += _clashes(candidates)
    if found:
        raise InputError(
            _located(index, problem, origins or {}) for index, problem in sorted(found, key=lambda one: one[0])
        )
    return Plugins(_manager(candidates, defaults).hook, tuple(one.record for one in candidates))


def provenance(plugins: Plugins, components_used: Iterable[Component]) -> dict[str, Any]:
    """Return which plugins and components took part, ready for `manifest.json`.

    Equal recipes with equal installed versions give equal results, so ranks and resumed runs can compare them.
    """
    return {
        "plugins": [
            {
                "name": record.name,
                "distribution": record.distribution,
                "version": record.version,
                "source": record.source,
                "sha256": record.sha256,
                "hooks": list(record.hooks),
            }
            for record in plugins.records
        ],
        "components": [
            {
                "group": one.group,
                "name": one.name,
                "value": one.value,
                "distribution": one.distribution,
                "version": one.version,
            }
            for one in sorted(set(components_used))
        ],
    }


def names_of(facts: Mapping[str, Any]) -> set[str]:
    """What `provenance` tells, for comparing: plugins, components and targets with what tells their code apart."""

    def owner(one: Mapping[str, Any]) -> str:
        return f"{one['distribution']} {one['version']}" if one["distribution"] else f"sha256 {one['sha256']}"

    def name(one: Mapping[str, Any]) -> str:
        # Where a one-file plugin lies may differ between machines and runs, its text may not.
        return str(one["name"]) if one["distribution"] else Path(one["source"]).name

    plugins = {f"plugin {name(one)} ({owner(one)})" for one in facts["plugins"]}
    plugins |= {f"{one['group']} {one['import_path']}" for one in facts.get("targets", ())}
    return plugins | {f"{one['group']} {one['name']} ({owner(one)})" for one in facts["components"]}


@dataclass(frozen=True)
class _Candidate:
    """A plugin that is loaded and checked but not active."""

    index: int
    plugin: object
    identity: Entry | Path
    functions: tuple[HookFunction, ...]
    record: PluginRecord


def _load(
    index: int, name: str, base_dir: Path, installed: InstalledPlugins, earlier: Sequence[_Candidate]
) -> _Candidate:
    identity = find_file(name, base_dir) if is_path(name) else _find(name, base_dir, installed)
    _refuse_repetition(name, [one for one in earlier if one.identity == identity])
    plugin: object
    if isinstance(identity, Path):
        plugin, digest = load_file(identity)
        record = PluginRecord(name, None, None, str(identity), (), digest)
    else:
        plugin = _import(identity)
        record = PluginRecord(identity.name, identity.distribution, identity.version, identity.value, ())
    _refuse_repetition(name, [one for one in earlier if one.plugin is plugin])
    functions, problems = check_plugin(plugin)
    if problems:
        raise InputError(replace(problem, message=f"{record}: {problem.message}") for problem in problems)
    _rehearse(record, functions)
    implemented = {one.hook.name for one in functions}
    record = replace(record, hooks=tuple(name for name in hooks() if name in implemented))
    return _Candidate(index, plugin, identity, functions, record)


def _rehearse(record: PluginRecord, functions: tuple[HookFunction, ...]) -> None:
    """Register the plugin where it does no harm: pluggy keeps what it accepted of a plugin before it refuses it."""
    try:
        _new_manager().register(GuardedPlugin(str(record), functions))
    except (pluggy.PluginValidationError, ValueError) as error:
        raise InputError(Problem(f"{record}: {' '.join(str(error).split())}")) from error


def _find(name: str, base_dir: Path, installed: InstalledPlugins) -> Entry:
    try:
        return installed.find(name)
    except InputError as error:
        if (base_dir / f"{name}.py").is_file():
            raise InputError(replace(one, hint=f"did you mean '{name}.py'?") for one in error.problems) from None
        raise


def _import(entry: Entry) -> object:
    unmet = check_requirement(entry.distribution)
    if unmet is not None:
        owner = f"plugin {entry.name!r} ({entry.distribution} {entry.version})"
        raise InputError(replace(unmet, message=f"{owner}: {unmet.message}"))
    try:
        return entry.load()
    except EntryLoadError as error:
        raise InputError(error.problem) from error


def _refuse_repetition(name: str, same: Sequence[_Candidate]) -> None:
    if same:
        first = same[0]
        also = "" if first.record.name == name else f" as {first.record.name!r}"
        raise InputError(Problem(f"plugin {name!r} is listed already{also}, in plugins[{first.index}]"))


def _clashes(candidates: Sequence[_Candidate]) -> list[tuple[int, Problem]]:
    """Return a problem for each plugin that answers a firstresult hook after another one, at its list index."""
    owners: dict[str, _Candidate] = {}
    found = []
    for one in candidates:
        for function in one.functions:
            if function.wrapper or not function.hook.firstresult:
                continue
            first = owners.setdefault(function.hook.name, one)
            if first is not one:
                message = f"{first.record} and {one.record} both answer {function.hook.name!r}"
                hint = "remove one of them, or make one a wrapper with hookimpl(wrapper=True)"
                found.append((one.index, Problem(message, hint=hint)))
    return found


def _located(index: int, problem: Problem, origins: Mapping[str, Origin]) -> Problem:
    path = f"plugins[{index}]"
    return replace(problem, path=path, origin=origins.get(path))


def _manager(candidates: Sequence[_Candidate], defaults: Sequence[object]) -> pluggy.PluginManager:
    manager = _new_manager()
    manager.add_hookcall_monitoring(_check_call, lambda outcome, name, implementations, arguments: None)
    # pluggy calls what was registered last first: the recipe's first plugin runs first, core's defaults last.
    for default in reversed(defaults):
        manager.register(default)
    for one in reversed(candidates):
        manager.register(GuardedPlugin(str(one.record), one.functions), name=f"plugins[{one.index}]")
    manager.check_pending()
    return manager


def _call_one(implementation: pluggy.HookImpl, **arguments: Any) -> Any:
    return implementation.function(*(arguments[name] for name in implementation.argnames))


def _new_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _check_call(name: str, implementations: Sequence[pluggy.HookImpl], arguments: Mapping[str, Any]) -> None:
    hook = hooks()[name]
    if arguments.keys() != set(hook.arguments):
        raise TypeError(f"the hook {hook.signature} was called with ({', '.join(arguments)})")
