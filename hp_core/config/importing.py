"""`_target_`: import what it names, and refuse what a recipe must not call."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

from hp_core.entry_points import describe
from hp_core.errors import InputError, Problem
from hp_core.spelling import did_you_mean

# What the decorators of hp_core set on a function.
REPLACEMENT_MARK = "__hp_module_replacement__"
INNER_WRAPPER_MARK = "__hp_inner_wrapper__"
LOCAL_COMPUTE_MARK = "__hp_local_compute__"


def import_callable(path: str) -> Callable[..., Any]:
    """Return the class or function at a dotted path.

    The path may go through attributes (`package.module.Class.from_config`). Raises `InputError`, without a
    position, for a path that can't be imported, that is not callable, and for everything that comes from the
    standard library or builtins, whatever module it was reached through.
    """
    found = _import_object(path, _similar_name)
    if not callable(found):
        raise InputError(Problem(f"{path!r} is not callable", hint="name a class or a function"))
    if _from_standard_library(found):
        raise InputError(_standard_library(path))
    function: Callable[..., Any] = found
    return function


def import_module_type(path: str) -> type:
    """Return the `nn.Module` class at a dotted path. Raises `InputError`, without a position, if there is none."""
    found = _import_object(path, _similar_type)
    if isinstance(found, types.ModuleType):
        classes = _own_module_types(found)
        advice = f"name one of its classes: {classes}" if classes else "name the class of the modules that match"
        raise InputError(Problem(f"{path!r} is a Python module, not a class", hint=advice))
    if not isinstance(found, type) or not _is_module_type(found):
        advice = "name the class of the modules that match"
        raise InputError(Problem(f"{path!r} is not a torch.nn.Module class", hint=advice))
    return found


def _module_types(owner: Any) -> dict[str, type]:
    """Return the `nn.Module` classes in a module or class, by name."""
    # `__dict__`, unlike `dir` and `getattr`, makes no lazy module import what it offers.
    found = getattr(owner, "__dict__", {}).items()
    return {name: value for name, value in found if isinstance(value, type) and _is_module_type(value)}


def _own_module_types(owner: Any) -> str:
    """Return the names of those that a module defines itself, as a list for a hint."""
    defined_in = getattr(owner, "__name__", None)
    return ", ".join(name for name, value in _module_types(owner).items() if value.__module__ == defined_in)


def _is_module_type(found: type) -> bool:
    module_class = _module_class()
    return module_class is not None and issubclass(found, module_class)


def _module_class() -> type | None:
    """Return `nn.Module`; None where nothing has imported torch, so that no class can be one."""
    return getattr(sys.modules.get("torch.nn"), "Module", None)


def _import_object(path: str, advise: Callable[[str, Any], str]) -> Any:
    """Return what is at a dotted path; `advise` gives the hint for a last part that its owner lacks."""
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        hint = f"write {path.replace(':', '.')!r}" if path.count(":") == 1 else "write package.module.name"
        raise InputError(Problem(f"{path!r} is not a dotted path", hint=hint))
    if parts[0] in sys.stdlib_module_names:
        raise InputError(_standard_library(path))
    found = _import_module(parts[0], path)
    for index, part in enumerate(parts[1:], start=1):
        is_last = index == len(parts) - 1
        found = _attribute(found, parts[:index], part, path, advise if is_last else _similar_name)
    return found


def _attribute(owner: Any, owner_parts: list[str], part: str, path: str, advise: Callable[[str, Any], str]) -> Any:
    try:
        return getattr(owner, part)
    except AttributeError:
        pass
    except (Exception, SystemExit) as cause:  # a module may import lazily, and fail then
        raise InputError(Problem(f"{path!r} can't be imported: {describe(cause)}")) from cause
    name = ".".join(owner_parts)
    if _search_path(owner) and importlib.util.find_spec(f"{name}.{part}") is not None:
        return _import_module(f"{name}.{part}", path)
    kind = "module" if isinstance(owner, types.ModuleType) else "object"
    raise InputError(Problem(f"the {kind} {name!r} has no {part!r}", hint=advise(part, owner)))


def _similar_name(name: str, owner: Any) -> str:
    public = [one for one in dir(owner) if not one.startswith("_")]
    return did_you_mean(name, [*public, *_submodules(owner)])


def _similar_type(name: str, owner: Any) -> str:
    submodules = _submodules(owner)
    guess = did_you_mean(name, [*_module_types(owner), *submodules])
    if guess:
        return guess
    if classes := _own_module_types(owner):
        return f"its classes: {classes}"
    return f"its modules: {', '.join(submodules)}" if submodules else ""


def _submodules(owner: Any) -> list[str]:
    return [module.name for module in pkgutil.iter_modules(_search_path(owner))]


def _search_path(owner: Any) -> list[str]:
    """Return where the modules of a package are; nothing else has any."""
    return list(getattr(owner, "__path__", ())) if isinstance(owner, types.ModuleType) else []


def _import_module(name: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as cause:
        if cause.name == name:
            hint = "install its package, or put its directory on PYTHONPATH"
            raise InputError(Problem(f"{path!r} can't be imported: no module named {name!r}", hint=hint)) from cause
        message = f"{path!r} can't be imported: {name!r} needs the module {cause.name!r}, which is not installed"
        raise InputError(Problem(message)) from cause
    except (Exception, SystemExit) as cause:
        raise InputError(Problem(f"{path!r} can't be imported: {name!r} raises {describe(cause)}")) from cause


def _standard_library(path: str) -> Problem:
    message = f"{path!r} is from the standard library, which a recipe can't call"
    return Problem(message, hint="name a class or function of your own or of an installed package")


def _from_standard_library(found: Any) -> bool:
    if isinstance(found, functools.partial):
        return _from_standard_library(found.func)
    if isinstance(found, types.MethodType):
        return _from_standard_library(found.__func__)
    module = getattr(found, "__module__", None)
    if not isinstance(found, (type, types.FunctionType)) and not isinstance(module, str):
        # A bound method of a built-in object has no module; its type's is `builtins`.
        module = type(found).__module__
    return str(module).partition(".")[0] in sys.stdlib_module_names


def check_is_loss(function: Callable[..., Any], returns: Any, path: str) -> Problem | None:
    """Return a problem unless the callable is an `nn.Module` class, or may return an `nn.Module` object.

    `returns` is its return annotation, `inspect.Signature.empty` if it has none. Must be called after the import
    of the callable: a module that never imported torch has no `nn.Module`.
    """
    module_class = _module_class()
    hint = "a loss is a torch.nn.Module class, or a function that returns one"
    if isinstance(function, type):
        if not _is_module_type(function):
            return Problem(f"{path!r} is not a torch.nn.Module", hint=hint)
        return None
    if returns is inspect.Signature.empty or returns is Any or isinstance(returns, str):
        return None
    classes = [one for one in _members(returns) if isinstance(one, type)]
    if not classes or (module_class is not None and any(issubclass(one, module_class) for one in classes)):
        return None
    shown = getattr(returns, "__name__", None) or str(returns)
    return Problem(f"{path!r} returns {shown}, not a torch.nn.Module", hint=hint)


def check_is_replacement(function: Callable[..., Any], returns: Any, path: str) -> Problem | None:
    """Return a problem unless the callable is marked as a factory of replacements; its own mark, not its base's."""
    return _unmarked(function, REPLACEMENT_MARK, f"{path!r} is no module replacement", "module_replacement")


def check_is_inner_wrapper(function: Callable[..., Any], returns: Any, path: str) -> Problem | None:
    """Return a problem unless the callable is marked as an inner wrapper."""
    return _unmarked(function, INNER_WRAPPER_MARK, f"{path!r} is no inner wrapper", "inner_wrapper")


def check_is_local_compute(function: Callable[..., Any], returns: Any, path: str) -> Problem | None:
    """Return a problem unless the callable is marked as a factory of local computations."""
    return _unmarked(function, LOCAL_COMPUTE_MARK, f"{path!r} is no local computation", "local_compute")


def _unmarked(function: Callable[..., Any], mark: str, message: str, decorator: str) -> Problem | None:
    marked = getattr(function, "__func__", function)
    if mark in getattr(marked, "__dict__", {}):
        return None
    return Problem(message, hint=f"decorate it with @hp_core.{decorator}")


def _members(annotation: Any) -> Iterable[Any]:
    return getattr(annotation, "__args__", None) or (type(None) if annotation is None else annotation,)
