"""The rules of a recipe applied to a model: all of them, or none."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hp_core.config.plan_override import PlanOverride
from hp_core.entry_points import describe
from hp_core.errors import ArgumentError, HpError, InputError, Problem
from hp_core.model.replacement.claim import Claim, Rule, claim, listing
from hp_core.model.replacement.contract import ReplacementContext, ResetsBuffers, WeightTransform, transforms_of
from hp_core.model.replacement.structure import Structure, lost_call, lost_records, lost_structure, recorded_types
from hp_core.model.replacement.transforms import inherit_requires_grad, misnamed, names_of, wrong_transforms
from hp_core.parallel.agreement import require_same_everywhere
from hp_core.parallel.plan.active import is_active

if TYPE_CHECKING:
    from hp_core.parallel.setup import DistributedSetup


@dataclass(frozen=True)
class Replaced:
    """One module that was replaced: by which rule, under which names, and both modules."""

    rule: Rule
    fqns: tuple[str, ...]
    original: nn.Module
    replacement: nn.Module
    transforms: tuple[WeightTransform, ...] = ()


@dataclass
class ModuleReplacer:
    """Applies the replacements of `plan_overrides` to the models of a run.

    `replace_module` is the hook that gives the replacement of one module. `summaries` says what was replaced, once
    something was; `unfilled` are the names of replacements whose own tensors still have to be made.
    """

    overrides: Sequence[PlanOverride]
    replace_module: Callable[..., Any]
    summaries: list[dict[str, Any]] = field(default_factory=list)
    applied: bool = False
    unfilled: set[str] = field(default_factory=set)

    def apply(self, model: nn.Module, setup: DistributedSetup) -> tuple[Replaced, ...]:
        """Replace modules of `model`, which is on the meta device and not sharded yet, in place.

        Every rule is matched, then every replacement built, then every one validated; only then are they installed.

        Raises:
            InputError: with every problem of the phase that found any; the model is as it was.
        """
        rules, replaced = self._built(model, setup.sizes.all, setup)
        require_same_everywhere("module replacements", _digest(replaced), setup)
        _install(model, replaced)
        self.unfilled |= {
            one.fqns[0] for one in replaced if one.transforms or isinstance(one.replacement, ResetsBuffers)
        }
        self.summaries += _summaries(rules, replaced)
        self.applied = True
        return replaced

    def apply_alone(self, model: nn.Module, sizes: Mapping[str, int]) -> None:
        """Replace modules of `model`, on the meta device, as a run of these parallel sizes does, without its processes.

        Raises:
            InputError: see `apply`.
        """
        _install(model, self._built(model, sizes, None)[1])

    def require_applied(self) -> None:
        """Refuse a model builder that left the recipe's rules aside.

        Raises:
            InputError: there are rules, and nothing has applied them, or made the tensors of what they replaced.
        """
        message = ""
        if not self.applied and any(one.replace_module is not None for one in self.overrides):
            message = "the model was built without its replacements"
        elif self.unfilled:
            message = f"{listing(sorted(self.unfilled))}: replaced, but nothing filled the replacement's own tensors"
        if message:
            hint = "a model builder finishes its skeleton with hp_core.finish_model(model, distributed_setup)"
            raise InputError(Problem(message, "plan_overrides", hint=hint))

    def lines(self) -> Iterator[str]:
        """Yield what was replaced, in a line for each rule."""
        for one in self.summaries:
            if one["modules"]:
                types = ", ".join(one["types"])
                yield f"{one['rule']}: {one['factory']} replaced {len(one['modules'])} modules ({types})"
            else:
                yield f"{one['rule']}: {one['factory']} left out: when: {one['when']}, and that size is 1"

    def _built(
        self, model: nn.Module, sizes: Mapping[str, int], setup: DistributedSetup | None
    ) -> tuple[list[Rule], tuple[Replaced, ...]]:
        sizes = MappingProxyType(dict(sizes))
        rules = [Rule(i, one) for i, one in enumerate(self.overrides) if one.replace_module is not None]
        active = [rule for rule in rules if is_active(rule.override, sizes)]
        claims = claim(model, active, [rule for rule in rules if rule not in active])
        return rules, self._build(model, claims, sizes, setup) if claims else ()

    def _build(
        self, model: nn.Module, claims: Sequence[Claim], sizes: Mapping[str, int], setup: DistributedSetup | None
    ) -> tuple[Replaced, ...]:
        findings = _Findings()
        context = context_of(model, sizes, setup)
        before = {id(one): Structure.of(one.module) for one in claims}
        built: list[Replaced] = []
        with _on(_device_of(model), context.dtype):
            for one in claims:
                try:
                    made = self._replacement(one, context)
                except InputError as error:
                    findings.add_all(one, error)
                else:
                    built.append(Replaced(one.rule, one.fqns, one.module, made))
        if not findings.problems():
            built = list(_Validation(model, built, before, findings).run(claims))
        if findings.problems():
            raise InputError(findings.problems())
        return tuple(built)

    def _replacement(self, one: Claim, context: ReplacementContext) -> nn.Module:
        target = one.rule.override.replace_module
        assert target is not None
        # `dataclasses.replace` takes longer than the rest of this method, for each of hundreds of modules.
        context = ReplacementContext(**{**vars(context), "layer_index": layer_index_of(one.fqn), "target": target})
        try:
            made = self.replace_module(module=one.module, module_fqn=one.fqn, context=context)
        except ArgumentError as error:
            # A plugin's: those of the factory are located by its target already.
            raise InputError(Problem(error.message, target.section, hint=error.hint)) from error
        except HpError:
            raise
        except (Exception, SystemExit) as error:
            raise InputError(Problem(f"{target.spelling} raises {describe(error)}", target.section)) from error
        if not isinstance(made, nn.Module):
            found = f"the replacement is {_a(made)}, not a torch.nn.Module"
            raise InputError(Problem(found, target.section))
        if made is one.module:
            hint = "return a new module; narrow match where one is to be kept"
            raise InputError(Problem("the replacement is the very module to be replaced", target.section, hint=hint))
        return made


def replace_modules(model: nn.Module, distributed_setup: DistributedSetup) -> tuple[Replaced, ...]:
    """Apply the recipe's `plan_overrides` to a model, in place, before it is sharded; for model builders.

    Returns what was replaced, for `hp_core.model.replacement.layout.original_layout`. See `ModuleReplacer.apply`.
    """
    replacer = distributed_setup.replacer
    return () if replacer is None else replacer.apply(model, distributed_setup)


@dataclass
class _Findings:
    """Problems of many modules, one line for each kind: 94 layers of a model have the same one."""

    fqns: dict[tuple[str, str, str], list[str]] = field(default_factory=dict)

    def add(self, one: Replaced, message: str) -> None:
        # Not the factory's name: a plugin may have answered in its place.
        name = type(one.replacement).__name__
        self._add(f"{one.rule.path}.replace_module", f"{name} {message}", "", one.fqns[0])

    def add_all(self, one: Claim, error: InputError) -> None:
        for problem in error.problems:
            self._add(problem.path or f"{one.rule.path}.replace_module", problem.message, problem.hint, one.fqn)

    def _add(self, path: str, message: str, hint: str, fqn: str) -> None:
        self.fqns.setdefault((path, message, hint), []).append(fqn)

    def problems(self) -> list[Problem]:
        """Return them with the first module's name and how many more there are."""
        found = []
        for (path, message, hint), fqns in self.fqns.items():
            more = f" (and {len(fqns) - 1} more)" if len(fqns) > 1 else ""
            found.append(Problem(f"{fqns[0]}{more}: {message}", path, hint=hint))
        return found


@dataclass
class _Validation:
    model: nn.Module
    built: Sequence[Replaced]
    before: Mapping[int, Structure]
    findings: _Findings
    calls: dict[tuple[type, type], str | None] = field(default_factory=dict)
    tried: dict[int, dict[object, tuple[str, ...]]] = field(default_factory=dict)

    def run(self, claims: Sequence[Claim]) -> Iterator[Replaced]:
        recorded = recorded_types(self.model)
        owners: dict[int, Replaced] = {}
        for one, its_claim in zip(self.built, claims, strict=True):
            first = owners.setdefault(id(one.replacement), one)
            if first is not one:
                self.findings.add(one, f"is the replacement of {first.fqns[0]} as well; build one for each")
            yield self._checked(one, self.before[id(its_claim)], recorded)

    @cached_property
    def shared(self) -> frozenset[int]:
        """The ids of the parameters that are held in more than one place."""
        return _shared_parameters(self.model)

    def _checked(self, one: Replaced, before: Structure, recorded: Mapping[str, tuple[type, ...]]) -> Replaced:
        try:
            after = Structure.of(one.replacement)
            transforms = transforms_of(one.replacement)
        except (Exception, SystemExit) as error:
            self.findings.add(one, f"can't be looked at: {describe(error)}")
            return one
        problems = [*misnamed(transforms, before, after)] if transforms else []
        if not problems:
            names = names_of(transforms)
            problems = [*lost_structure(one.original, before, one.replacement, after, names)]
        if transforms and not problems:
            tried = self.tried.setdefault(one.rule.index, {})
            problems += wrong_transforms(transforms, before, after, self.shared, tried)
        problems += lost_records(one.original, one.replacement, recorded)
        lost = self._lost_call(one.original, one.replacement)
        for problem in problems if lost is None else [*problems, lost]:
            self.findings.add(one, problem)
        return replace(one, transforms=transforms) if transforms else one

    def _lost_call(self, source: nn.Module, replacement: nn.Module) -> str | None:
        if type(replacement).forward is nn.Module.forward and "forward" not in vars(replacement):
            return "has no forward"
        if "forward" in vars(source) or "forward" in vars(replacement):
            return lost_call(source.forward, replacement.forward)
        key = (type(source), type(replacement))
        if key not in self.calls:
            self.calls[key] = lost_call(source.forward, replacement.forward)
        return self.calls[key]


def _install(model: nn.Module, replaced: Sequence[Replaced]) -> None:
    owners = dict(model.named_modules(remove_duplicate=False))
    for one in replaced:
        if one.replacement.training != one.original.training:
            one.replacement.train(one.original.training)
        inherit_requires_grad(one.transforms, one.original, one.replacement)
        for fqn in one.fqns:
            owner, _, leaf = fqn.rpartition(".")
            owners[owner]._modules[leaf] = one.replacement


def _digest(replaced: Sequence[Replaced]) -> list[tuple[Any, ...]]:
    """What every rank must have replaced alike."""
    return [
        (one.rule.index, one.fqns[0], f"{type(one.replacement).__module__}.{type(one.replacement).__qualname__}")
        for one in replaced
    ]


def _a(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _shared_parameters(model: nn.Module) -> frozenset[int]:
    """The ids of the parameters that are held in more than one place."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                (shared if id(parameter) in seen else seen).add(id(parameter))
    return frozenset(shared)


def context_of(model: nn.Module, sizes: Mapping[str, int], setup: DistributedSetup | None) -> ReplacementContext:
    """Return what factories are told about the model and the run, without what is true of one module only.

    Without a setup there are no ranks, and so no mesh.
    """
    dtypes = (one.dtype for one in model.parameters() if one.is_floating_point())
    return ReplacementContext(
        layer_index=None,
        model_config=copy.deepcopy(model.config) if "config" in vars(model) else None,
        sizes=sizes,
        mesh=None if setup is None else setup.mesh,
        device=torch.device("cpu") if setup is None else setup.device,
        dtype=next(dtypes, torch.get_default_dtype()),
    )


def layer_index_of(fqn: str) -> int | None:
    """Return the first number in a module's name."""
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", fqn)
    return int(number.group(1)) if number else None


def _device_of(model: nn.Module) -> torch.device:
    return next((one.device for one in model.parameters()), torch.device("cpu"))


@contextmanager
def _on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """New tensors are like the model's: on its device, of its type."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(usual)


def _summaries(rules: Iterable[Rule], replaced: Sequence[Replaced]) -> Iterator[dict[str, Any]]:
    for rule in rules:
        own = [one for one in replaced if one.rule is rule]
        target = rule.override.replace_module
        assert target is not None
        yield {
            "rule": rule.path,
            "factory": target.spelling,
            "when": rule.override.when,
            "modules": [fqn for one in own for fqn in one.fqns],
            "types": sorted({f"{type(one.original).__name__} -> {type(one.replacement).__name__}" for one in own}),
        }
