"""The boundaries of a plan with what a recipe's contracts say of them: checked, and made whole by what follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from hp_core.errors import InputError, Problem
from hp_core.parallel.plan.boundary import Boundary, ParameterPlan
from hp_core.parallel.plan.contract import Contract, grouped
from hp_core.parallel.plan.edge import PARTIAL, REPLICATE, Edge, Placement, conversion, shard
from hp_core.parallel.plan.roles import KV_PROJECTIONS, is_plain, roles_of

_REGIONS = ("attention", "mlp")


def with_contracts(
    model: PreTrainedModel, boundaries: Sequence[Boundary], contracts: Sequence[Contract], tp_size: int
) -> list[Boundary]:
    """`boundaries`, those of modules with a contract replaced by what it says; what it leaves out stays as derived.

    Raises:
        InputError: with everything that is wrong: a parameter that belongs elsewhere or can't be cut so, an edge that
            no collective can cross, an output that nothing beside it takes in.
    """
    problems: list[Problem] = []
    found = list(boundaries)
    for contract in contracts:
        if not contract.is_of_tensors:
            continue
        writing = _Writing(model, contract, tp_size, found)
        own = list(writing.problems())
        problems += own
        if not own and writing.changes_anything:
            found = writing.laid_over()
    problems += _disagreements(found, contracts)
    if problems:
        raise InputError(grouped(problems))
    return found


@dataclass
class _Writing:
    """One contract on its way into the boundaries."""

    model: PreTrainedModel
    contract: Contract
    tp_size: int
    boundaries: list[Boundary]

    def __post_init__(self) -> None:
        fqn = self.contract.fqn
        self.module = self.model.get_submodule(fqn)
        self.derived = next((one for one in self.boundaries if one.fqn == fqn and one.kind in _REGIONS), None)
        self.inside = [one for one in self.boundaries if one.fqn == fqn or one.fqn.startswith(f"{fqn}.")]
        self.shapes = {
            f"{one.fqn}.{parameter.name}"[len(fqn) + 1 :]: parameter.shape
            for one in self.inside
            for parameter in one.parameters
        }
        self.cuts = self._cuts()
        self.row = self._row()
        self.output = self._output()
        self.inputs = self._inputs()

    @property
    def is_shared(self) -> bool:
        """Whether each rank computes its own share."""
        return bool(self.cuts) or self.output[0] != REPLICATE

    @property
    def changes_anything(self) -> bool:
        """Whether the module is more than computed whole on every rank, or was."""
        return self.is_shared or any(edge != (REPLICATE, REPLICATE) for edge in (self.output, *self.inputs.values()))

    @property
    def _has_cut(self) -> bool:
        """Whether a rank computes on parts, of parameters or of inputs."""
        return bool(self.cuts) or any(dst.kind == "shard" for _, dst in self.inputs.values())

    def problems(self) -> Iterator[Problem]:
        """Everything that is wrong with it."""
        fqn, contract = self.contract.fqn, self.contract
        around = next((one for one in self.boundaries if one.kind in _REGIONS and fqn.startswith(f"{one.fqn}.")), None)
        if around is not None:
            yield contract.problem(
                "match", f"is a part of {around.fqn}, which is planned as one", f"match {around.fqn!r}"
            )
            return
        outer = next((one for one in self.boundaries if one.kind == "contract" and fqn.startswith(f"{one.fqn}.")), None)
        if outer is not None:
            yield contract.problem("match", f"is inside {outer.fqn}, which another entry plans", "match one of them")
            return
        below = next((one for one in self.inside if one.kind in (*_REGIONS, "contract") and one.fqn != fqn), None)
        if below is not None and self.changes_anything:
            hint = "match either what it holds or a module without such parts"
            yield contract.problem("match", f"holds {below.fqn}, which is planned as one", hint)
            return
        yield from self._wrong_cuts()
        yield from self._half_cut()
        yield from self._wrong_edges()

    def laid_over(self) -> list[Boundary]:
        """The boundaries with this one, in the place of those inside it."""
        first = self.boundaries.index(self.inside[0]) if self.inside else len(self.boundaries)
        rest = [one for one in self.boundaries if one not in self.inside]
        return [*rest[:first], self._boundary(), *rest[first:]]

    def _boundary(self) -> Boundary:
        row, kept = self.row, self.derived is not None and self.contract.params("tp") is None
        parameters = tuple(self._parameter(name, shape) for name, shape in self.shapes.items())
        if kept and self.derived is not None:
            parameters = self.derived.parameters
        src, dst = self.output
        name = row or ""
        output = (
            Edge(name, src, dst, self._features(row), self._itemsize) if (src, dst) != (REPLICATE, REPLICATE) else None
        )
        inputs = tuple(
            Edge(argument, *edge, self._features(None), self._itemsize, self.is_shared and edge[1] == REPLICATE)
            for argument, edge in self.inputs.items()
        )
        if kept and self.derived is not None:
            return replace(self.derived, inputs=inputs, output=output, note=f"written by {self.contract.path}")
        kind = self.derived.kind if self.derived is not None else "contract"
        return Boundary(
            self.contract.fqn,
            kind,
            type(self.module).__name__,
            parameters,
            inputs,
            output,
            row if src == PARTIAL else None,
            self.derived.kv_groups if self.derived is not None else None,
            f"written by {self.contract.path}",
        )

    def _parameter(self, name: str, shape: tuple[int, ...]) -> ParameterPlan:
        dim = self.cuts.get(name)
        # The bias of a row is added once, after the sum.
        is_row_bias = self.row is not None and name == (f"{self.row}.bias" if self.row else "bias")
        return ParameterPlan(name, shape, shard_dim=dim, partial=dim is None and self.is_shared and not is_row_bias)

    def _cuts(self) -> dict[str, int]:
        written = self.contract.params("tp")
        if written is None:
            known = self.derived.parameters if self.derived is not None else ()
            return {one.name: one.shard_dim for one in known if one.shard_dim is not None}
        return {name: one.dim for name, one in written.items() if one.dim is not None}

    def _row(self) -> str | None:
        """The one linear module whose inputs are cut: the ranks add up what it gives."""
        rows = [
            name
            for name, child in self.module.named_modules()
            if isinstance(child, nn.Linear) and is_plain(child, nn.Linear) and self._dim(name, child.weight) == 1
        ]
        return rows[0] if len(rows) == 1 else None

    def _dim(self, name: str, weight: torch.Tensor) -> int | None:
        dim = self.cuts.get(f"{name}.weight" if name else "weight")
        return None if dim is None else dim % weight.ndim

    @property
    def _own_dim(self) -> int | None:
        """How the weight is cut of a module that is linear itself, whose edges follow from that."""
        return self._dim("", self.module.weight) if isinstance(self.module, nn.Linear) else None

    def _output(self) -> tuple[Placement, Placement]:
        src, dst = REPLICATE, REPLICATE
        if self.derived is not None and self.derived.output is not None and self.cuts:
            src, dst = self.derived.output.src, self.derived.output.dst
        elif self._own_dim is not None:
            src = PARTIAL if self._own_dim == 1 else shard(-1)
        written_src, written_dst = self.contract.output("out_src"), self.contract.output("out_dst")
        return (src if written_src is None else written_src), (dst if written_dst is None else written_dst)

    def _inputs(self) -> dict[str, tuple[Placement, Placement]]:
        derived: dict[str, tuple[Placement, Placement]] = {}
        if self.derived is not None and self.cuts:
            derived = {edge.name: (edge.src, edge.dst) for edge in self.derived.inputs}
        elif self._own_dim is not None:
            derived = {"input": (REPLICATE, shard(-1) if self._own_dim == 1 else REPLICATE)}
        src, dst = self.contract.inputs("in_src"), self.contract.inputs("in_dst")
        names = dict.fromkeys((*derived, *(src or {}), *(dst or {})))
        return {
            name: (
                src.get(name, REPLICATE) if src is not None else derived.get(name, (REPLICATE, REPLICATE))[0],
                dst.get(name, REPLICATE) if dst is not None else derived.get(name, (REPLICATE, REPLICATE))[1],
            )
            for name in names
        }

    def _wrong_cuts(self) -> Iterator[Problem]:
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        for name, dim in self.cuts.items():
            path, shape = f"params.{name}", tuple(parameters[name].shape)
            if name not in self.shapes:
                yield self.contract.problem(path, f"{name} is tied to a parameter of another module", "cut that one")
            elif not -len(shape) <= dim < len(shape):
                yield self.contract.problem(path, f"{name} has {len(shape)} dimensions, and none is {dim}")
            elif shape[dim] % self.tp_size:
                works = ", ".join(str(size) for size in range(1, min(64, shape[dim]) + 1) if shape[dim] % size == 0)
                message = f"{shape[dim]} of {name} can't be shared by {self.tp_size} ranks"
                yield self.contract.problem(path, message, f"tp_size that would: {works}")
            else:
                yield from self._wrong_cut(name, dim % len(shape))
        for name, child in self.module.named_modules():
            bias = f"{name}.bias" if name else "bias"
            is_cut = isinstance(child, nn.Linear) and self._dim(name, child.weight) == 0
            if is_cut and child.bias is not None and bias not in self.cuts and self.contract.params("tp") is not None:
                hint = f"write {bias}: {{tp: shard(0)}}"
                yield self.contract.problem("params", f"the weight of {name or 'it'} is cut and its bias is not", hint)

    def _wrong_cut(self, name: str, dim: int) -> Iterator[Problem]:
        """Cuts that the module which holds the parameter doesn't compute with."""
        path, _, leaf = name.rpartition(".")
        owner = self.module.get_submodule(path)
        if isinstance(owner, nn.Linear) and dim == 1 and leaf == "weight" and not is_plain(owner, nn.Linear):
            message = f"{path or 'it'} is no plain torch.nn.Linear, so that its outputs may be no summands"
            yield self.contract.problem(f"params.{name}", message, "leave it whole")
        if isinstance(owner, nn.Embedding) and dim == 0:
            hint = "remove the entry: embeddings are cut by vocabulary as it is; or write shard(1)"
            yield self.contract.problem(f"params.{name}", f"a rank would miss rows of {name}", hint)
        tied = next(self._tied_to(owner.get_parameter(leaf)), None)
        if tied is not None:
            message = f"{name} is tied to {tied}, which would compute with a part"
            yield self.contract.problem(
                f"params.{name}", message, "write tie_word_embeddings: false, or leave it whole"
            )

    def _tied_to(self, parameter: nn.Parameter) -> Iterator[str]:
        """The names beyond the module that a parameter has."""
        for fqn, other in self.model.named_parameters(remove_duplicate=False):
            if other is parameter and not f".{fqn}".startswith(f".{self.contract.fqn}."):
                yield fqn

    def _half_cut(self) -> Iterator[Problem]:
        """Projections of an attention or MLP that are not cut alike, so that their outputs wouldn't fit each other."""
        roles = roles_of(self.contract.fqn, self.module, self.model.tp_plan)
        if roles is None or self.contract.params("tp") is None:
            return
        linears = {**roles.columns, roles.row: roles.row_linear}
        wanted = {name: 1 if name == roles.row else 0 for name in linears}
        dims = {name: self._dim(name, linear.weight) for name, linear in linears.items()}
        first = next((name for name in linears if dims[name] is not None), None)
        if first is None:
            return
        for name, dim in dims.items():
            if dim != wanted[name]:
                hint = f"write {name}.weight: {{tp: shard({wanted[name]})}}, or params: none to keep all whole"
                yield self.contract.problem("params", f"{first} is cut, and {name} is not so that it fits", hint)
        for one in self.derived.parameters if self.derived is not None else ():
            if one.partial and one.name in self.cuts and one.name.partition(".")[0] in KV_PROJECTIONS:
                message = f"{one.name} has fewer heads than there are ranks"
                yield self.contract.problem("params", message, "remove params: the planner has ranks share them")

    def _wrong_edges(self) -> Iterator[Problem]:
        src, dst = self.output
        if self._has_cut and src == REPLICATE:
            cut = "parameters" if self.cuts else "inputs"
            message = f"its {cut} are cut, and nothing says how its output lies"
            yield self.contract.problem("out_src", message, "write out_src: {tp: partial} or {tp: shard(-1)}")
        elif not self._has_cut and src != REPLICATE:
            message = f"its output is {src}, and neither a parameter nor an input of it is cut"
            yield self.contract.problem(
                "out_src", message, "write out_src: {tp: replicate}, or cut what it computes with"
            )
        elif not _crosses(src, dst):
            yield self.contract.problem("out_dst", f"nothing makes {dst} of {src}", "write out_dst: {tp: replicate}")
        for name, (before, after) in self.inputs.items():
            edge = Edge(name, before, after, 1, 1, self.is_shared and after == REPLICATE)
            if not _crosses(before, after) or not _crosses(*edge.gradient):
                field = "in_dst" if self.contract.inputs("in_dst") is not None else "in_src"
                yield self.contract.problem(f"{field}.{name}", f"nothing makes {after} of {before}")

    @property
    def _itemsize(self) -> int:
        return next((one.itemsize for one in self.module.parameters()), 4)

    def _features(self, row: str | None) -> int:
        """Numbers for each token of an edge: of a linear module its own, else the width of the model."""
        linear = self.module.get_submodule(row) if row is not None else self.module
        if isinstance(linear, nn.Linear):
            return linear.out_features if row is not None or self._own_dim == 0 else linear.in_features
        return int(self.model.config.get_text_config().hidden_size)


def _crosses(src: Placement, dst: Placement) -> bool:
    try:
        conversion(src, dst)
    except ValueError:
        return False
    return True


def _disagreements(boundaries: Sequence[Boundary], contracts: Sequence[Contract]) -> Iterator[Problem]:
    """Outputs that are left cut, or inputs that are taken so, with nothing beside them for which that is meant.

    Between modules the hidden states are whole; a chain of modules may keep them cut among themselves.
    """
    written = {one.fqn: one for one in contracts}
    by_parent: dict[str, list[Boundary]] = {}
    for one in boundaries:
        by_parent.setdefault(one.fqn.rpartition(".")[0], []).append(one)
    for siblings in by_parent.values():
        given = _placements((one.fqn, one.output.dst) for one in siblings if one.output is not None)
        taken = _placements((one.fqn, edge.src) for one in siblings for edge in one.inputs)
        for field, mine, others, verb in (("out_dst", given, taken, "takes"), ("in_src", taken, given, "gives")):
            for placement, fqns in mine.items():
                contract = next((written[fqn] for fqn in fqns if fqn in written), None)
                if placement == REPLICATE or contract is None:
                    continue
                alike = {fqn for other, found in others.items() if _is_same(other, placement) for fqn in found}
                if not alike - {contract.fqn}:
                    beside = (
                        "; ".join(f"{found[0]} {verb} {other}" for other, found in others.items())
                        or "nothing is planned"
                    )
                    message = f"{field} is {placement}, and no module beside it {verb} that: {beside}"
                    yield contract.problem(field, message, "write replicate, or plan its neighbour alike")


def _placements(pairs: Iterator[tuple[str, Placement]]) -> Mapping[Placement, list[str]]:
    found: dict[Placement, list[str]] = {}
    for fqn, placement in pairs:
        found.setdefault(placement, []).append(fqn)
    return found


def _is_same(one: Placement, other: Placement) -> bool:
    """Whether two placements of hidden states, which are (rows, tokens, features), are one."""
    if one.dim is None or other.dim is None:
        return one == other
    return one.dim % 3 == other.dim % 3
