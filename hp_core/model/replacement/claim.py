"""Which modules the rules of a recipe select: every rule is matched before anything is built."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from hp_core.config.importing import import_module_type
from hp_core.config.plan_override import PlanOverride
from hp_core.errors import InputError, Problem
from hp_core.spelling import did_you_mean, nearest


@dataclass(frozen=True)
class Rule:
    """One entry of `plan_overrides` and its place in the list."""

    index: int
    override: PlanOverride

    @property
    def path(self) -> str:
        """The entry's path in the recipe."""
        return f"plan_overrides[{self.index}]"

    def pattern_path(self, number: int) -> str:
        """The path of one of the entry's patterns."""
        return f"{self.path}.match" + (f"[{number}]" if len(self.override.match) > 1 else "")


@dataclass(frozen=True)
class Claim:
    """A module that a rule selects. A shared module has several `fqns`; the first is the one it goes by."""

    rule: Rule
    module: nn.Module
    fqns: tuple[str, ...]

    @property
    def fqn(self) -> str:
        """The module's first name."""
        return self.fqns[0]


@dataclass
class _Claims:
    by_module: dict[int, Claim] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def claim(
    model: nn.Module, rules: Iterable[Rule], idle: Iterable[Rule] = (), verb: str = "replaces", *, nested: bool = False
) -> list[Claim]:
    """Match every rule against the names of the model's modules, its root left out.

    A pattern is a case-sensitive glob in which `*` crosses dots; it must be the whole name. `idle` rules claim nothing,
    but names and types don't depend on the topology for which they are meant, so theirs are checked as well. `verb` is
    what a rule does to a module; `nested` allows one inside another.

    Raises:
        InputError: with all problems: a pattern without a hit, a hit of another type than the rule's, modules of
            several types under a rule without one, a module that two rules claim, a claim inside another.
    """
    modules = {fqn: module for fqn, module in model.named_modules(remove_duplicate=False) if fqn}
    names: dict[int, list[str]] = {}
    for fqn, module in modules.items():
        names.setdefault(id(module), []).append(fqn)
    claims = _Claims()
    for rule in rules:
        hits = _hits(rule, modules, claims.problems)
        claims.problems += _wrong_types(rule, hits)
        _claim(rule, hits, names, claims)
    for rule in idle:
        claims.problems += _wrong_types(rule, _hits(rule, modules, claims.problems))
    if not nested:
        claims.problems += _nested(claims.by_module.values(), verb)
    if claims.problems:
        raise InputError(claims.problems)
    return list(claims.by_module.values())


def listing(names: Sequence[str], limit: int = 3) -> str:
    """Return the first few of some names, and how many there are beyond them."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def _hits(rule: Rule, modules: Mapping[str, nn.Module], problems: list[Problem]) -> dict[str, nn.Module]:
    hits: dict[str, nn.Module] = {}
    for number, pattern in enumerate(rule.override.match):
        matches = re.compile(fnmatch.translate(pattern)).match
        found = {fqn: module for fqn, module in modules.items() if matches(fqn)}
        if not found:
            hint = nearest_pattern(pattern, modules)
            problems.append(Problem(f"{pattern!r} matches no module", rule.pattern_path(number), hint=hint))
        hits.update(found)
    return hits


def nearest_pattern(pattern: str, fqns: Iterable[str]) -> str:
    """A pattern that does match, else the names that there are."""
    general = sorted({re.sub(r"\b\d+\b", "*", fqn) for fqn in fqns})
    whole = did_you_mean(pattern, general)
    if whole:
        return whole
    last = pattern.rpartition(".")[2].strip("*")
    near = nearest(last, sorted({fqn.rpartition(".")[2] for fqn in general}))
    if near is not None and last:
        head, _, tail = pattern.rpartition(last)
        return f"did you mean {head + near + tail!r}?"
    return f"its modules are {listing(general, 12)}"


def _wrong_types(rule: Rule, hits: Mapping[str, nn.Module]) -> Iterator[Problem]:
    wanted = rule.override.module_type
    if wanted is None:
        kinds: dict[type, str] = {}
        for fqn, module in hits.items():
            kinds.setdefault(type(module), fqn)
        if len(kinds) > 1:
            found = listing([f"{kind.__name__} ({fqn})" for kind, fqn in kinds.items()])
            message = f"matches modules of {len(kinds)} types: {found}"
            yield Problem(message, f"{rule.path}.match", hint="narrow the pattern, or write module_type")
        return
    module_type = import_module_type(wanted)
    exact = rule.override.exact_type
    wrong = [
        f"{fqn} is a {type(module).__name__}"
        for fqn, module in hits.items()
        if not (type(module) is module_type if exact else isinstance(module, module_type))
    ]
    if wrong:
        kind = f"{module_type.__name__}{' exactly' if exact else ''}"
        message = f"{len(wrong)} of the {len(hits)} modules that match are no {kind}: {listing(wrong)}"
        yield Problem(message, f"{rule.path}.module_type", hint="narrow the pattern of match")


def _claim(rule: Rule, hits: Mapping[str, nn.Module], names: Mapping[int, list[str]], claims: _Claims) -> None:
    twice: dict[str, list[str]] = {}
    for fqn, module in hits.items():
        first = claims.by_module.setdefault(id(module), Claim(rule, module, tuple(names[id(module)])))
        if first.rule.index != rule.index:
            twice.setdefault(first.rule.path, []).append(fqn)
    for other, fqns in twice.items():
        message = f"{listing(fqns)}: claimed by {other} already: one module, one rule"
        claims.problems.append(Problem(message, f"{rule.path}.match", hint="narrow one of the patterns"))


def _nested(claims: Iterable[Claim], verb: str) -> Iterator[Problem]:
    owners = {fqn: one for one in claims for fqn in one.fqns}
    inside: dict[tuple[str, str], list[str]] = {}
    for fqn, one in owners.items():
        for end in (index for index, character in enumerate(fqn) if character == "."):
            outer = owners.get(fqn[:end])
            if outer is not None and outer is not one:
                inside.setdefault((one.rule.path, outer.rule.path), []).append(f"{fqn} (in {fqn[:end]})")
                break
    for (inner, outer_path), fqns in inside.items():
        message = f"inside a module that {outer_path} {verb}: {listing(fqns)}"
        yield Problem(message, f"{inner}.match", hint="match the outer or the inner module, not both")
