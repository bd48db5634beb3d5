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


# What `hp_core.module_replacement` sets on a factory.
REPLACEMENT_MARK = "__hp_module_replacement__"


def import_callable(path: str) -> Callable[..., Any]:
    """Return the class or function at a dotted path.

    The path may go through attributes (`package.module.Class.from_config`). Raises `InputError`, without a
    position, for a path that can't be imported, that is not callable, and for everything that comes from the
    standard library or builtins, whatever module it was reached through.
    """
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        hint = f"write {path.replace(':', '.')!r}" if path.count(":") == 1 else "write package.module.name"
        raise InputError(Problem(f"{path!r} is not a dotted path", hint=hint))
    if parts[0] in sys.stdlib_module_names:
        raise InputError(_standard_library(path))
    found = _import_module(parts[0], path)
    for index, part in enumerate(parts[1:], start=1):
        found = _attribute(found, parts[:index], part, path)
    if not callable(found):
        raise InputError(Problem(f"{path!r} is not callable", hint="name a class or a function"))
    if _from_standard_library(found):
        raise InputError(_standard_library(path))
    function: Callable[..., Any] = found
    return function


def _attribute(owner: Any, owner_parts: list[str], part: str, path: str) -> Any:
    try:
        return getattr(owner, part)
    except AttributeError:
        pass
    except (Exception, SystemExit) as cause:  # a module may import lazily, and fail then
        raise InputError(Problem(f"{path!r} can't be imported: {describe(cause)}")) from cause
    name = ".".join(owner_parts)
    if isinstance(owner, types.ModuleType) and hasattr(owner, "__path__"):
        if importlib.util.find_spec(f"{name}.{part}") is not None:
            return _import_module(f"{name}.{part}", path)
        choices = [*_public_names(owner), *(module.name for module in pkgutil.iter_modules(owner.__path__))]
    else:
        choices = _public_names(owner)
    kind = "module" if isinstance(owner, types.ModuleType) else "object"
    raise InputError(Problem(f"the {kind} {name!r} has no {part!r}", hint=did_you_mean(part, choices)))


def _public_names(owner: Any) -> list[str]:
    return [name for name in dir(owner) if not name.startswith("_")]


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
    module_class = getattr(sys.modules.get("torch.nn"), "Module", None)
    hint = "a loss is a torch.nn.Module class, or a function that returns one"
    if isinstance(function, type):
        if module_class is None or not issubclass(function, module_class):
            return Problem(f"{path!r} is not a torch.nn.Module", hint=hint)
        return None
    if returns is inspect.Signature.empty or returns is Any or isinstance(returns, str):
        return None
    classes = [one for one in _members(returns) if isinstance(one, type)]
    if not classes or (module_class is not None and any(issubclass(one, module_class) for one in classes)):
        return None
    shown = getattr(returns, "__name__", None) or str(returns)
    return Problem(f"{path!r} returns {shown}, not a torch.nn.Module", hint=hint)


def _members(annotation: Any) -> Iterable[Any]:
    return getattr(annotation, "__args__", None) or (type(None) if annotation is None else annotation,)
