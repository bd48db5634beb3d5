"""Code of the user's inside a model: wrappers woven into attentions, and what experts compute with their own part."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from hp_core.config.importing import INNER_WRAPPER_MARK, LOCAL_COMPUTE_MARK
from hp_core.config.plan_override import PlanOverride
from hp_core.config.target import Target
from hp_core.entry_points import describe
from hp_core.errors import HpError, InputError, Problem
from hp_core.model.replacement.claim import Claim, Rule, claim
from hp_core.model.replacement.contract import marked
from hp_core.parallel.expert.dispatch import LocalCompute
from hp_core.parallel.expert.experts import holds_experts
from hp_core.parallel.plan.active import is_active
from hp_core.parallel.plan.contract import by_name, grouped
from hp_core.parallel.plan.roles import GroupedAttention, LatentAttention
from hp_core.parallel.setup import DistributedSetup

Function = TypeVar("Function", bound=Callable[..., Any])


def inner_wrapper(function: Function) -> Function:
    """Mark a function that weaves code into an attention, so that `plan_overrides` may name it as `inner_wrapper`.

    It is called once for each attention that the entry matches, with the keyword `target_module` (on the meta device,
    before anything is sharded) and those of `mesh`, `tp_mesh`, `cp_mesh` and `ep_mesh` that it declares, and with the
    arguments that the recipe writes. It puts another `forward` into `target_module` and returns None. That forward
    runs on this rank's heads and its part of each sequence. `ep_mesh` is None where experts are not spread.

    Raises:
        TypeError: it doesn't declare `target_module`, or takes `**kwargs`, which would swallow misspelt arguments.
    """
    return marked(function, INNER_WRAPPER_MARK, "inner wrapper", ("target_module",))


def local_compute(factory: Function) -> Function:
    """Mark a function that makes a computation of experts, so that `plan_overrides` may name it as `local_compute_fn`.

    It is called once for each module of experts that the entry matches, with those of the keywords `module`, `mesh`,
    `tp_mesh`, `cp_mesh` and `ep_mesh` that it declares, and with the arguments that the recipe writes. It returns a
    function with the parameters of the module's forward, which takes its place. While that runs, the module's
    parameters are this rank's part of them, so it sends tokens to the experts' ranks itself. `ep_mesh` is None where
    experts are not spread.

    Raises:
        TypeError: it takes `**kwargs`, which would swallow misspelt arguments.
    """
    return marked(factory, LOCAL_COMPUTE_MARK, "local computation", ())


@dataclass(frozen=True)
class Injection:
    """Code of the user's that a module now runs: the entry, the recipe's name of the component, and the modules."""

    path: str
    component: str
    fqns: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path}: {self.component} in {self.fqns[0]}" + (
            f" and {len(self.fqns) - 1} more" if len(self.fqns) > 1 else ""
        )


def inject(model: nn.Module, overrides: Iterable[PlanOverride], setup: DistributedSetup) -> tuple[Injection, ...]:
    """Weave every active `inner_wrapper` and `local_compute_fn` into `model`, which is on meta and whole, in place.

    Raises:
        InputError: a pattern without a hit, a match that is no attention or holds no experts, a wrapper that returns
            something or leaves the forward as it was, a computation with other parameters than the forward's.
    """
    entries = [Rule(index, one) for index, one in enumerate(overrides)]
    wrappers = [(one, target) for one in entries if (target := one.override.inner_wrapper) is not None]
    computes = [(one, target) for one in entries if (target := one.override.local_compute_fn) is not None]
    return (
        *_injected(model, wrappers, setup, _woven, "inner_wrapper"),
        *_injected(model, computes, setup, _swapped, "local_compute_fn"),
    )


_Injecting = Callable[[Claim, Target, Mapping[str, Any]], Iterator[Problem]]


def _injected(
    model: nn.Module,
    entries: Sequence[tuple[Rule, Target]],
    setup: DistributedSetup,
    injecting: _Injecting,
    field: str,
) -> Iterator[Injection]:
    targets = {one.index: target for one, target in entries}
    rules = [Rule(one.index, by_name(one.override)) for one, _ in entries]
    active = [one for one in rules if is_active(one.override, setup.sizes.all)]
    claims = claim(model, active, verb="changes") if active else []
    idle = [one for rule in rules if rule not in active for one in claim(model, [rule], verb="changes")]
    problems = [problem for one in (*claims, *idle) for problem in _of_another_kind(one, field)]
    meshes = {
        "mesh": setup.mesh,
        "tp_mesh": setup.mesh["tp"],
        "cp_mesh": setup.cp_mesh,
        "ep_mesh": None if setup.expert_mesh is None else setup.expert_mesh["ep"],
    }
    for one in claims if not problems else ():
        problems += injecting(one, targets[one.rule.index], meshes)
    if problems:
        raise InputError(grouped(problems))
    by_rule: dict[int, list[Claim]] = {}
    for one in claims:
        by_rule.setdefault(one.rule.index, []).append(one)
    for index, own in by_rule.items():
        path = f"{own[0].rule.path}.{field}"
        yield Injection(path, targets[index].spelling, tuple(one.fqn for one in own))


def _of_another_kind(one: Claim, field: str) -> Iterator[Problem]:
    path, kind = f"{one.rule.path}.match", type(one.module).__name__
    if field == "inner_wrapper" and not isinstance(one.module, (GroupedAttention, LatentAttention)):
        yield Problem(
            f"{one.fqn}: {kind} is no attention, which an inner wrapper is for", path, hint="narrow the pattern"
        )
    elif field == "local_compute_fn" and not holds_experts(one.module):
        message = f"{one.fqn}: {kind} holds no experts, which a local computation is for"
        yield Problem(message, path, hint="narrow the pattern, as in '*.experts'")


def _woven(one: Claim, target: Target, meshes: Mapping[str, Any]) -> Iterator[Problem]:
    path = f"{one.rule.path}.inner_wrapper"
    before = one.module.forward
    given, problem = _built(one, path, target, target_module=one.module, **meshes)
    if problem is not None:
        yield problem
        return
    if given is not None:
        yield Problem(f"{one.fqn}: {target.spelling} returns a {type(given).__name__}, not None", path)
    elif one.module.forward == before:
        message = f"{one.fqn}: {target.spelling} leaves the forward as it was"
        yield Problem(message, path, hint="put another into target_module.forward")
    else:
        yield from _other_parameters(one, before, one.module.forward, path, target)


def _swapped(one: Claim, target: Target, meshes: Mapping[str, Any]) -> Iterator[Problem]:
    path = f"{one.rule.path}.local_compute_fn"
    compute, problem = _built(one, path, target, module=one.module, **meshes)
    if problem is not None:
        yield problem
        return
    if not callable(compute):
        yield Problem(f"{one.fqn}: {target.spelling} returns a {type(compute).__name__}, no function", path)
        return
    wrong = list(_other_parameters(one, one.module.forward, compute, path, target))
    if not wrong:
        one.module.forward = LocalCompute(compute)
    yield from wrong


def _built(one: Claim, path: str, target: Target, **given: Any) -> tuple[Any, Problem | None]:
    try:
        return target.build(**given), None
    except HpError:
        raise
    except Exception as error:
        return None, Problem(f"{one.fqn}: {target.spelling} raises {describe(error)}", path)


def _other_parameters(
    one: Claim, before: Callable[..., Any], after: Callable[..., Any], path: str, target: Target
) -> Iterator[Problem]:
    wanted, found = inspect.signature(before).parameters, inspect.signature(after).parameters
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in found.values())
    named = [name for name, parameter in wanted.items() if parameter.kind is not parameter.VAR_KEYWORD]
    missing = [name for name in named if name not in found]
    if missing and not is_open:
        message = f"{one.fqn}: the function of {target.spelling} doesn't take {', '.join(missing)}"
        yield Problem(message, path, hint=f"declare ({', '.join(wanted)})")
