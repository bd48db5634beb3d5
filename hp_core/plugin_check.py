"""What is wrong with a plugin object, found before it is registered; pluggy alone notices almost none of it."""

from __future__ import annotations

import importlib.metadata
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from hp_core import hookspecs
from hp_core.entry_points import canonical
from hp_core.errors import Problem
from hp_core.hooks import Hook, hooks
from hp_core.spelling import did_you_mean, nearest

HOST = "hyperparallel"

# A helper may well be called `replace_modules`; only a name this close to a hook's is taken for a typing error.
_TYPO_RATIO = 0.9
_STATE_HOOKS = ("save_state", "load_state")


@dataclass(frozen=True)
class HookFunction:
    """One checked hook implementation; `function` is bound when it is a method."""

    hook: Hook
    function: Callable[..., Any]
    wrapper: bool


def check_plugin(plugin: object) -> tuple[tuple[HookFunction, ...], tuple[Problem, ...]]:
    """Return the hook implementations of a plugin object and everything that is wrong with it.

    A plugin is a module or an instance of a class. The problems have no position.
    """
    if isinstance(plugin, type):
        return (), (Problem("is a class", hint="let the entry point name a module or an instance of the class"),)
    outdated = _version_problem(getattr(plugin, "hp_requires", None))
    if outdated is not None:
        return (), (outdated,)  # whatever else is wrong follows from the wrong version
    implementations: list[HookFunction] = []
    problems: list[Problem] = []
    for name, function in _functions(plugin):
        options = _options(function)
        if options is None:
            problems += _undecorated(plugin, name, function)
            continue
        hook = hooks().get(options["specname"] or name)
        faults = _faults(name, function, options, hook)
        problems += faults
        if hook is not None and not faults:
            implementations.append(HookFunction(hook, function, options["wrapper"]))
    problems += _repeated(implementations) + _state_faults(implementations)
    if not implementations and not problems:
        problems.append(Problem("has no hookimpl", hint="decorate its functions with @hookimpl from hp_core.hookspecs"))
    return tuple(implementations), tuple(problems)


def check_requirement(distribution: str) -> Problem | None:
    """Compare the range of hyperparallel versions that a distribution's metadata asks for with this one.

    pip checks the range when the distribution is installed, but not when hyperparallel is upgraded later.
    """
    for line in importlib.metadata.requires(distribution) or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if canonical(requirement.name) == HOST and applies:
            return _version_problem(str(requirement.specifier))
    return None


def _version_problem(required: object) -> Problem | None:
    if required is None:
        return None
    try:
        accepted = SpecifierSet(str(required))
    except InvalidSpecifier:
        return Problem(f"hp_requires is {required!r}, which is no version range", hint="write it as '>=0.1,<0.2'")
    version = _host_version()
    if version is None or accepted.contains(version, prereleases=True):
        return None
    return Problem(f"needs {HOST} {accepted}, and this is {version}", hint="install a version of it made for this one")


def _functions(plugin: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield what could be a hook implementation, without running properties."""
    hookable = types.FunctionType, types.MethodType, staticmethod, classmethod
    for name in dir(plugin):
        static = inspect.getattr_static(plugin, name, None)
        if isinstance(static, hookable) or _options(static) is not None:
            yield name, getattr(plugin, name)


def _options(function: object) -> dict[str, Any] | None:
    options = getattr(function, "__dict__", {}).get(f"{hookspecs.PROJECT}_impl")
    return options if isinstance(options, dict) else None


def _undecorated(plugin: object, name: str, function: Callable[..., Any]) -> list[Problem]:
    if isinstance(plugin, types.ModuleType) and function.__module__ != plugin.__name__:
        return []  # imported from elsewhere, core's own `build_model` for one
    hint = "decorate it with @hookimpl, or rename it if it is a helper (_{} for one)".format(name.lstrip("_"))
    if name in hooks():
        return [Problem(f"the function {name!r} is named like a hook but isn't decorated", hint=hint)]
    near = None if name.startswith("_") else nearest(name, hooks(), cutoff=_TYPO_RATIO)
    if near is None or not set(inspect.signature(function).parameters) <= set(hooks()[near].arguments):
        return []
    return [Problem(f"the function {name!r} looks like the hook {near!r} but isn't decorated", hint=hint)]


def _faults(name: str, function: Callable[..., Any], options: dict[str, Any], hook: Hook | None) -> list[Problem]:
    if hook is None:
        wanted = options["specname"] or name
        hint = did_you_mean(wanted, hooks()) or f"hooks: {', '.join(hooks())}"
        return [Problem(f"the hookimpl {wanted!r} is no hook of {_host()}", hint=hint)]
    if not isinstance(function, types.FunctionType | types.MethodType):
        return [Problem(f"the hookimpl {name!r} is a {type(function).__name__}", hint="decorate a plain function")]
    problems = []
    for option in ("tryfirst", "trylast"):
        if options[option]:
            hint = "the order of plugins is the order in which the recipe lists them"
            problems.append(Problem(f"the hookimpl {name!r} sets {option}", hint=hint))
    if options["hookwrapper"]:
        problems.append(Problem(f"the hookimpl {name!r} is an old-style wrapper", hint="use hookimpl(wrapper=True)"))
    if options["optionalhook"]:
        hint = "say which versions the plugin works with, as in hp_requires = '>=0.1,<0.2'"
        problems.append(Problem(f"the hookimpl {name!r} sets optionalhook, which hides a misspelt name", hint=hint))
    return problems + _kind_faults(name, function, options) + _argument_faults(name, function, hook)


def _kind_faults(name: str, function: Callable[..., Any], options: dict[str, Any]) -> list[Problem]:
    original = inspect.unwrap(function)
    if inspect.iscoroutinefunction(original) or inspect.isasyncgenfunction(original):
        return [Problem(f"the hookimpl {name!r} is async", hint="hooks are plain functions")]
    yields = inspect.isgeneratorfunction(original)
    if options["wrapper"] and not yields:
        hint = "get the result of the others with `result = yield`, then return it"
        return [Problem(f"the wrapper {name!r} doesn't yield", hint=hint)]
    if yields and not options["wrapper"] and not options["hookwrapper"]:
        return [Problem(f"the hookimpl {name!r} yields but is no wrapper", hint="use hookimpl(wrapper=True)")]
    return []


def _argument_faults(name: str, function: Callable[..., Any], hook: Hook) -> list[Problem]:
    problems = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY):
            message = f"the hookimpl {name!r} takes {str(parameter)!r}, which hooks never receive"
            problems.append(Problem(message, hint=f"list plain arguments out of {hook.signature}"))
        elif parameter.name not in hook.arguments:
            message = f"the hookimpl {name!r} takes {parameter.name!r}, which {_host()} doesn't provide"
            problems.append(Problem(message, hint=f"the hook is {hook.signature}"))
        elif parameter.default is not parameter.empty:
            message = f"the hookimpl {name!r} gives {parameter.name!r} a default, which would hide the host's value"
            problems.append(Problem(message, hint="remove the default"))
    return problems


def _repeated(implementations: list[HookFunction]) -> list[Problem]:
    names = [one.hook.name for one in implementations]
    return [
        Problem(f"implements {name!r} {names.count(name)} times", hint="keep one function for each hook")
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]


def _state_faults(implementations: list[HookFunction]) -> list[Problem]:
    """What a plugin saves it must load, and both concern this plugin alone."""
    own = {one.hook.name: one for one in implementations if one.hook.name in _STATE_HOOKS}
    problems = [
        Problem(f"the wrapper {name!r} has nothing to wrap: each plugin's state is its own", hint="use hookimpl()")
        for name, one in own.items()
        if one.wrapper
    ]
    if len(own) == 1:
        (name,) = own
        other = next(one for one in _STATE_HOOKS if one != name)
        problems.append(Problem(f"implements {name!r} without {other!r}", hint=f"add {hooks()[other].signature}"))
    return problems


def _host() -> str:
    version = _host_version()
    return HOST if version is None else f"{HOST} {version}"


def _host_version() -> str | None:
    try:
        return importlib.metadata.version(HOST)
    except importlib.metadata.PackageNotFoundError:  # a source tree that isn't installed
        return None
