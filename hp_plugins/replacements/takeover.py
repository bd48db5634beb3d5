"""A module with another forward and everything else as it was: class, attributes, tensors, children and hooks."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, TypeVar

from torch import nn

from hp_core.errors import ArgumentError

# What every module has a dictionary of its own for; hooks stay shared, so that their handles can still remove them.
_OWN = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class Behaviour(nn.Module):
    """Code that takes over a module. `take_over` makes it a subclass of the module's own class as well.

    So transformers, which finds norms, routers and attention by their class, still does. Copies and pickles are made
    from the two classes, since the joint one has no name to be imported by.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        behaviour, original = type(self).__bases__
        return _bare, (behaviour, original), vars(self)


Taken = TypeVar("Taken", bound=Behaviour)


def take_over(module: nn.Module, behaviour: type[Taken]) -> Taken:
    """Return a module like `module` that runs the code of `behaviour`; `module` itself stays as it is."""
    taken: Taken = _filled(_bare(behaviour, type(module)), module)
    return taken


Module = TypeVar("Module", bound=nn.Module)


def copied(module: Module) -> Module:
    """Return a module of the same class with the same tensors, children and hooks, to give other children."""
    return _filled(object.__new__(type(module)), module)


def arguments(module: nn.Module) -> tuple[str, ...]:
    """The names of what a module's forward takes, without self; a variable one with its stars.

    Raises:
        ArgumentError: somebody has set another forward on this one module, which a replacement would lose.
    """
    if "forward" in vars(module):
        raise ArgumentError("", f"the forward of this {type(module).__name__} was changed already")
    kind: Any = type(module)
    return _arguments(kind)


def the_only(positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return the one argument of a call. Families call it by different names (`x`, `hidden_states`)."""
    (argument,) = (*positional, *named.values())
    return argument


@cache
def _arguments(kind: Any) -> tuple[str, ...]:
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    return tuple(str(one.replace(annotation=one.empty, default=one.empty)) for one in parameters)


def _filled(new: Module, module: nn.Module) -> Module:
    state = dict(vars(module))
    for name in _OWN:
        state[name] = state[name].copy()
    vars(new).update(state)
    return new


def _bare(behaviour: Any, original: Any) -> Any:
    joint = _joint(behaviour, original)
    return joint.__new__(joint)


@cache
def _joint(behaviour: Any, original: Any) -> Any:
    # One class for each pair, so that a compiled function made for one layer fits the others.
    return type(f"{behaviour.__name__}[{original.__name__}]", (behaviour, original), {"__module__": __name__})
