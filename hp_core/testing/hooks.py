"""What a hook plugin promises: it loads alone, every hook is called, and it gives and leaves what the manual says."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from hp_core.errors import HpError, InputError
from hp_core.plugin_check import check_plugin, check_requirement
from hp_core.plugin_file import find_file, is_path, load_file
from hp_core.plugins import InstalledPlugins
from hp_core.testing.checks import BrokenPromiseError, Check, described, parametrize, require
from hp_core.testing.parts import TINY_RECIPE
from hp_core.testing.recording import SOURCE, Recording
from hp_core.testing.runs import run_recipe

# Makes a run fail once everything is built, for plugins that want to hear of it.
_FAILING = """\
from hp_core import RunError, hookimpl


@hookimpl
def on_train_start(run):
    raise RunError("the kit lets this run fail")
"""
_REPLACING = (
    "plan_overrides=[{match: '*.input_layernorm', replace_module: {_target_: hp_core.testing.parts.same_again}}]"
)


def hook_checks(
    plugin: object, /, *, recipe: str | None = None, skip: Mapping[str, str] | None = None
) -> pytest.MarkDecorator:
    """Run a test function, `def test_hooks(check): check()`, once for each promise of a hook plugin.

    Args:
        plugin: the module or object with the hook implementations; or its dotted path (`my_package.plugin`,
            `my_package.plugin:watch`), its name if it is installed, or the path of a one-file plugin.
        recipe: the text of a recipe in which all its hooks are called, without the plugin itself; by default a tiny
            one that evaluates, saves, and replaces modules if the plugin wants to see that.
        skip: why a promise doesn't apply, by its name.
    """
    return parametrize(HookChecks(plugin, recipe).checks(), skip or {})


@dataclass(frozen=True)
class _Recorded:
    recording: Recording
    error: Exception | None


class HookChecks:
    """The checks of one plugin; it takes part in a run once."""

    def __init__(self, plugin: object, recipe: str | None = None) -> None:
        self.plugin = plugin
        self.recipe = recipe

    def checks(self) -> list[Check]:
        """Every check, in the order in which a fault is best looked for."""
        promises: dict[str, tuple[str, Callable[[], None]]] = {
            "loads": ("it can be loaded alone, and every hookimpl is one", self.check_loads),
            "results": ("what it returns is what the hook must give", self.check_results),
            "arguments": ("it is given what the manual says, and leaves it as it is", self.check_arguments),
            "called": ("every hook that it implements is called in a run", self.check_called),
            "runs": ("a run with it ends well", self.check_runs),
        }
        subject = self.plugin if isinstance(self.plugin, str) else getattr(self.plugin, "__name__", None)
        subject = str(subject or type(self.plugin).__name__)
        return [Check(name, subject, promise, function) for name, (promise, function) in promises.items()]

    def check_loads(self) -> None:
        """The static checks of `hp-train plugins`."""
        _, problems = check_plugin(self._object)
        require(not problems, "; ".join(str(one) for one in problems))
        distribution = _distribution_of(self._object)
        unmet = check_requirement(distribution) if distribution is not None else None
        require(unmet is None, f"{distribution}: {unmet}")

    def check_results(self) -> None:
        """The kinds of results."""
        faults = self._recorded.recording.faults_returned
        require(not faults, "; ".join(dict.fromkeys(faults)))

    def check_arguments(self) -> None:
        """Arguments, before and after each call."""
        faults = self._recorded.recording.faults_given
        require(not faults, "; ".join(dict.fromkeys(faults)))

    def check_called(self) -> None:
        """Names of hooks."""
        recorded = self._recorded
        implemented = [one.hook.name for one in recorded.recording.implementations]
        missed = [name for name in implemented if name not in recorded.recording.calls]
        if not missed:
            return
        why = "give a recipe in which they are"
        if recorded.error is not None:
            why = f"the run ended before: {described(recorded.error)}"
        require(False, f"{', '.join(missed)}: never called; {why}")

    def check_runs(self) -> None:
        """How the run ended."""
        error = self._recorded.error
        if error is not None:
            raise BrokenPromiseError(described(error)) from error

    @cached_property
    def _object(self) -> object:
        return resolve(self.plugin)

    @cached_property
    def _recorded(self) -> _Recorded:
        implementations, problems = check_plugin(self._object)
        require(not problems, f"it can't be loaded: {'; '.join(str(one) for one in problems)}")
        requires = getattr(self._object, "hp_requires", None)
        recording = Recording(implementations, None if requires is None else str(requires))
        hooks = {one.hook.name for one in implementations}
        error = self._run(recording, hooks)
        if "on_exception" in hooks and error is None:
            self._run(recording, hooks, failing=True)
        return _Recorded(recording, error)

    def _run(self, recording: Recording, hooks: set[str], *, failing: bool = False) -> Exception | None:
        with tempfile.TemporaryDirectory() as directory, recording.active():
            folder = Path(directory)
            stand_in = folder / f"{re.sub(r'[^0-9a-zA-Z_]+', '_', str(self._name))}.py"
            stand_in.write_text(SOURCE, encoding="utf-8")
            plugins = [stand_in.name]
            if failing:
                (folder / "failing.py").write_text(_FAILING, encoding="utf-8")
                plugins.append("failing.py")
            text = TINY_RECIPE if self.recipe is None else self.recipe
            overrides = [_REPLACING] * (self.recipe is None and "replace_module" in hooks)
            overrides += self._others(text)
            try:
                run = run_recipe(text, overrides, folder, plugins=plugins)
                if "load_state" in hooks and not failing:
                    again = f"checkpoint.resume={run.directory}"
                    run_recipe(text, [*overrides, again], folder, plugins=plugins)
            except Exception as error:
                return error
        return None

    @property
    def _name(self) -> object:
        return self.plugin if isinstance(self.plugin, (str, Path)) else type(self.plugin).__name__

    def _others(self, text: str) -> list[str]:
        """An override that takes the plugin itself off a recipe's list, where it would be a second time."""
        data = YAML(typ="safe", pure=True).load(text)
        names = (data or {}).get("plugins") or [] if isinstance(data, dict) else []
        others = [name for name in names if not self._is_itself(str(name))]
        return [] if len(others) == len(names) else [f"plugins={others}"]

    def _is_itself(self, name: str) -> bool:
        try:
            return name == str(self.plugin) or resolve(name) is self._object
        except (HpError, ImportError, AttributeError):
            return False


def resolve(plugin: object) -> object:
    """The module or object that `hook_checks` was given, or that a text or path names.

    Raises:
        HpError: there is none, or it can't be loaded.
    """
    if isinstance(plugin, Path) or (isinstance(plugin, str) and is_path(plugin)):
        module, _ = load_file(find_file(str(plugin), Path.cwd()))
        return module
    if not isinstance(plugin, str):
        return plugin
    installed = InstalledPlugins.discover()
    if plugin in installed.names():
        return installed.find(plugin).load()
    name, _, attribute = plugin.partition(":")
    try:
        found: object = importlib.import_module(name)
        for part in attribute.split(".") if attribute else ():
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise InputError(f"no plugin {plugin!r}: {described(error)}") from error
    return found


def _distribution_of(plugin: object) -> str | None:
    module = getattr(plugin, "__name__", None) or type(plugin).__module__
    owners = importlib.metadata.packages_distributions().get(str(module).partition(".")[0], [])
    return owners[0] if owners else None
