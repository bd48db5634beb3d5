"""The modules that a section of the recipe names by pattern, or the model's layers where it names none."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from hp_core.errors import InputError, Problem
from hp_core.model.replacement.claim import nearest_pattern
from hp_core.model.units import blocks


def chosen_modules(model: nn.Module, patterns: Sequence[str] | None, path: str) -> list[tuple[str, nn.Module]]:
    """The modules that match any of some patterns, with their FQNs, in the order of the model.

    Args:
        model: the whole model, before it is divided into pipeline stages.
        patterns: case-sensitive globs in which `*` crosses dots, of whole FQNs; None takes each layer.
        path: where the recipe has the patterns.

    Raises:
        InputError: with all problems: a pattern without a hit, one of a list of modules, modules inside each other; or
            there are no layers.
    """
    if patterns is None:
        layers = blocks(model)
        if not layers:
            raise InputError(Problem("the model has no list of layers", path=path, hint="name modules by pattern"))
        return layers
    named = {name: module for name, module in model.named_modules() if name}
    problems: list[Problem] = []
    found: set[str] = set()
    for index, pattern in enumerate(patterns):
        hits = {name for name in named if fnmatchcase(name, pattern)}
        lists = sorted(name for name in hits if isinstance(named[name], (nn.ModuleList, nn.ModuleDict)))
        place = f"{path}[{index}]"
        if not hits:
            hint = nearest_pattern(pattern, named)
            problems.append(Problem(f"{pattern!r} matches no module of the model", path=place, hint=hint))
        elif lists:
            message = f"{pattern!r} matches {lists[0]!r}, a list, which has no forward pass"
            problems.append(Problem(message, path=place, hint="use a pattern of its members alone"))
        found |= hits
    problems += [] if problems else _inside_each_other(found, path)
    if problems:
        raise InputError(problems)
    return [(name, module) for name, module in named.items() if name in found]


def _inside_each_other(names: set[str], path: str) -> list[Problem]:
    for name in sorted(names):
        parts = name.split(".")
        around = [parent for length in range(1, len(parts)) if (parent := ".".join(parts[:length])) in names]
        if around:
            message = f"{name!r} is inside {around[0]!r}, which is matched as well"
            return [Problem(message, path=path, hint="use patterns that match one of the two")]
    return []
