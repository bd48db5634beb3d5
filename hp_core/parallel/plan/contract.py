"""The sharding contract of a recipe: what its entries say of modules, laid over what the planner derives."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from hp_core.config.plan_override import AxisPlacements, PlanOverride
from hp_core.errors import InputError, Problem
from hp_core.model.replacement.claim import Claim, Rule, claim
from hp_core.parallel.plan.active import is_active
from hp_core.parallel.plan.edge import REPLICATE, Placement
from hp_core.parallel.sizes import ParallelSizes
from hp_core.spelling import did_you_mean


@dataclass(frozen=True)
class Contract:
    """What an entry of the recipe says of one module: `path` is the entry's, `fqn` the module's."""

    path: str
    fqn: str
    override: PlanOverride

    def problem(self, field: str, message: str, hint: str = "") -> Problem:
        """What is wrong with one of its fields, for this module."""
        return Problem(f"{self.fqn}: {message}", f"{self.path}.{field}", hint=hint)

    def params(self, axis: str) -> dict[str, Placement] | None:
        """The placements of parameters on an axis, by name; None where the planner's stay."""
        return _on_axis(self.override.params, axis)

    def inputs(self, field: str) -> dict[str, Placement] | None:
        """The placements of arguments on the tensor axis, by name, that `in_src` or `in_dst` writes; None as above."""
        return _on_axis(self.override.in_src if field == "in_src" else self.override.in_dst, "tp")

    def output(self, field: str) -> Placement | None:
        """The placement of the output on the tensor axis that `out_src` or `out_dst` writes; None as above."""
        written = self.override.out_src if field == "out_src" else self.override.out_dst
        if written is None or (written.is_written and written.tp is None):
            return None
        return _placement(written, "tp")

    @property
    def is_of_tensors(self) -> bool:
        """Whether it says anything of the tensor axis."""
        inputs, outputs = map(self.inputs, ("in_src", "in_dst")), map(self.output, ("out_src", "out_dst"))
        return any(one is not None for one in (self.params("tp"), *inputs, *outputs))

    @property
    def keeps_whole(self) -> bool:
        """Whether it says that tensor ranks share no parameter of the module."""
        written = self.params("tp")
        return written is not None and all(one == REPLICATE for one in written.values())


def contracts_of(model: nn.Module, overrides: Iterable[PlanOverride], sizes: ParallelSizes) -> tuple[Contract, ...]:
    """The contract of each module that has one, of entries that are active; those of the others are checked as well.

    Raises:
        InputError: a pattern without a hit, modules of several types or another than the entry's, a module that two
            entries match, a parameter or an argument that a module doesn't have, a placement that means nothing.
    """
    rules = [Rule(index, by_name(one)) for index, one in enumerate(overrides) if one.has_contract]
    active = [rule for rule in rules if is_active(rule.override, sizes.all)]
    claims = claim(model, active, verb="plans", nested=True) if active else []
    idle = [one for rule in rules if rule not in active for one in claim(model, [rule], verb="plans", nested=True)]
    problems = [problem for one in (*claims, *idle) for problem in _misnamed(one)]
    if problems:
        raise InputError(grouped(problems))
    return tuple(Contract(one.rule.path, one.fqn, one.rule.override) for one in claims)


def experts_kept_whole(fqn: str, module: nn.Module, contracts: Iterable[Contract]) -> bool:
    """Whether a contract says that expert ranks don't share the experts of this module.

    Raises:
        InputError: it says so of some of the parameters, or cuts them otherwise than by expert.
    """
    for one in contracts:
        inside = fqn == one.fqn or fqn.startswith(f"{one.fqn}.")
        written = one.params("ep") if inside else None
        if written is None:
            continue
        prefix = fqn[len(one.fqn) + 1 :] + "." if fqn != one.fqn else ""
        found = {str(written.get(prefix + name, REPLICATE)) for name, _ in module.named_parameters()}
        if found not in ({"replicate"}, {"shard(0)"}):
            message = f"experts are spread whole, by shard(0) of all their parameters, not {', '.join(sorted(found))}"
            raise InputError(one.problem("params", message))
        return found == {"replicate"}
    return False


def by_name(override: PlanOverride) -> PlanOverride:
    """The entry without its type where it replaces: what it matches now is the replacement."""
    if override.replace_module is None:
        return override
    return override.model_copy(update={"module_type": None, "exact_type": False})


def _placement(written: AxisPlacements, axis: str) -> Placement:
    text = written.on(axis)
    return REPLICATE if text is None else Placement.parse(text)


def _on_axis(written: Mapping[str, AxisPlacements] | None, axis: str) -> dict[str, Placement] | None:
    """Placements by name; None where no name has one on this axis, unless all is cleared."""
    if written is None or (written and all(one.on(axis) is None for one in written.values())):
        return None
    return {name: _placement(one, axis) for name, one in written.items()}


def _misnamed(one: Claim) -> Iterator[Problem]:
    contract, override = Contract(one.rule.path, one.fqn, one.rule.override), one.rule.override
    parameters = dict(one.module.named_parameters(remove_duplicate=False))
    for name, written in (override.params or {}).items():
        if name not in parameters:
            hint = did_you_mean(name, list(parameters)) or f"it has {', '.join(parameters) or 'none'}"
            yield contract.problem(f"params.{name}", f"{type(one.module).__name__} has no parameter {name!r}", hint)
        yield from _meaningless(contract, f"params.{name}", written, cp=("replicate",), ep=("replicate", "shard(0)"))
        if not written.is_written:
            yield contract.problem(f"params.{name}", "nothing is written of it", "write {tp: replicate}, or remove it")
        if written.tp == "partial":
            hint = "write replicate or shard(N)"
            yield contract.problem(f"params.{name}.tp", "a parameter is no summand", hint)
    arguments = inspect.signature(one.module.forward).parameters
    for field, named in (("in_src", override.in_src), ("in_dst", override.in_dst)):
        for name, written in (named or {}).items():
            if name not in arguments:
                hint = did_you_mean(name, list(arguments)) or f"it takes {', '.join(arguments)}"
                yield contract.problem(
                    f"{field}.{name}", f"the forward of {type(one.module).__name__} takes no {name!r}", hint
                )
            yield from _meaningless(contract, f"{field}.{name}", written, cp=("shard(1)",), ep=("replicate",))
    for field, output in (("out_src", override.out_src), ("out_dst", override.out_dst)):
        if output is not None:
            yield from _meaningless(contract, field, output, cp=("shard(1)",), ep=("replicate",))


def _meaningless(
    contract: Contract, field: str, written: AxisPlacements, *, cp: Sequence[str], ep: Sequence[str]
) -> Iterator[Problem]:
    """Placements on axes along which the work is shared in one way only."""
    for axis, text, known in (("cp", written.cp, cp), ("ep", written.ep, ep)):
        if text is not None and text not in known:
            hint = f"write {' or '.join(known)}, or leave it out"
            yield contract.problem(f"{field}.{axis}", f"what lies on the ranks of {axis} can't be {text!r}", hint)


def grouped(problems: Iterable[Problem]) -> list[Problem]:
    """One line for each kind: 94 layers of a model have the same one."""
    groups: dict[tuple[str, str, str], list[Problem]] = {}
    for one in problems:
        groups.setdefault((one.path, one.message.partition(": ")[2], one.hint), []).append(one)
    found = []
    for (_, message, _), alike in groups.items():
        first = alike[0].message.partition(": ")[0]
        more = f" (and {len(alike) - 1} more)" if len(alike) > 1 else ""
        found.append(replace(alike[0], message=f"{first}{more}: {message}"))
    return found
