"""Hook implementations that name their plugin when they fail."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Any

from hp_core.entry_points import describe
from hp_core.errors import HpError, RunError
from hp_core.hookspecs import hookimpl
from hp_core.plugin_check import HookFunction


class PluginError(RunError):
    """A plugin's hook failed; the exception that it raised is the cause."""


class GuardedPlugin:
    """The object that stands for a plugin in the plugin manager.

    Each hook implementation is an attribute under the hook's name. An exception inside one becomes a `PluginError`
    that starts with `owner`; an `HpError` already speaks to the user and passes unchanged.
    """

    def __init__(self, owner: str, functions: tuple[HookFunction, ...]) -> None:
        for one in functions:
            guarded = _guard_wrapper(owner, one) if one.wrapper else _guard(owner, one)
            setattr(self, one.hook.name, hookimpl(guarded, wrapper=one.wrapper))


def _guard(owner: str, implementation: HookFunction) -> Callable[..., Any]:
    function = implementation.function

    @functools.wraps(function)
    def guarded(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except HpError:
            raise
        except (Exception, SystemExit) as cause:
            raise _error(owner, implementation, f"raised {describe(cause)}") from cause

    return guarded


def _guard_wrapper(owner: str, implementation: HookFunction) -> Callable[..., Generator[None, Any, Any]]:
    function = implementation.function

    # Not `yield from`: an exception of the wrapped call that only passes through isn't this plugin's.
    @functools.wraps(function)
    def guarded(*arguments: Any) -> Generator[None, Any, Any]:
        passing: BaseException | None = None
        result: Any = None
        yielded = False
        try:
            steps = function(*arguments)
            next(steps)
            yielded = True
            try:
                result = yield
            except BaseException as error:
                passing = error
            _ = steps.send(result) if passing is None else steps.throw(passing)
        except StopIteration as stop:
            replaced = stop.value
        except HpError:
            raise
        except (Exception, SystemExit) as cause:
            if cause is passing:
                raise
            raise _error(owner, implementation, f"raised {describe(cause)}") from cause
        else:
            raise _error(owner, implementation, "yielded more than once")
        if not yielded:
            raise _error(owner, implementation, "returned without a yield")
        if implementation.hook.firstresult and result is not None and replaced is None:
            raise _error(owner, implementation, "returned None instead of the result that it got from yield")
        return replaced

    return guarded


def _error(owner: str, implementation: HookFunction, what: str) -> PluginError:
    return PluginError(f"{owner}: {implementation.hook.name} {what}")
