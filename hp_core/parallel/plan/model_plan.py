"""The plan of a whole model on all axes, derived in one process, on meta, however many ranks there will be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hp_core.config.plan_override import PlanOverride
from hp_core.errors import InputError, Problem
from hp_core.model.adapters.layers import plain_modules, saved_modules
from hp_core.parallel.expert.experts import experts_of
from hp_core.parallel.plan.activations import NOTHING_SPARED, Activations
from hp_core.parallel.plan.adapters import with_adapters
from hp_core.parallel.plan.boundary import Boundary, ShardingPlan
from hp_core.parallel.plan.contract import contracts_of, experts_kept_whole
from hp_core.parallel.plan.derive import derive_plan
from hp_core.parallel.plan.exchange import Exchange, Settings, exchange_lines, exchanges_of
from hp_core.parallel.plan.layout import (
    Cut,
    ModelLayout,
    ParameterLayout,
    axis_sizes,
    expert_shard_dim,
    fsdp_cuts,
    unsharable_experts,
)
from hp_core.parallel.plan.stages import StagePlan, plan_stages
from hp_core.parallel.sizes import ParallelSizes


@dataclass(frozen=True)
class ModelPlan:
    """How a model lies on the ranks of these sizes, and what they exchange. Data alone: nothing is applied yet.

    `tensors` is what tensor ranks share, None where there is one; `experts` are the modules whose experts are spread,
    `exchanges` what ranks of the other axes send each other, and `stages` those of a pipeline. `activations` is what
    becomes of those, on any number of ranks.
    """

    sizes: ParallelSizes
    layout: ModelLayout
    tensors: ShardingPlan | None = None
    experts: tuple[str, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    stages: tuple[StagePlan, ...] = ()
    activations: Activations = NOTHING_SPARED

    @property
    def total_parameters(self) -> int:
        """The elements of the whole model."""
        return self.layout.total

    def summary(self) -> str:
        """In a line, how many ranks share the model along which axes, and how much of it one of them holds."""
        sizes = " x ".join(f"{axis} {size}" for axis, size in self.sizes.all.items() if size > 1)
        most, fewest = self.layout.most_local_parameters, self.layout.fewest_local_parameters
        held = f"{most:,}" if most == fewest else f"{fewest:,} to {most:,}"
        return f"plan: {sizes}: a rank holds {held} of {self.total_parameters:,} parameters"

    def explain(self, fqn: str | None = None) -> str:
        """The plan of all axes as text, layers that are planned alike together; with `fqn`, that module alone.

        Raises:
            KeyError: nothing is planned for a module of that name.
        """
        exchanges = [one for one in self.exchanges if fqn in (None, one.fqn)]
        lines = [] if fqn is not None else [self.summary()]
        if self.tensors is not None and (fqn is None or not exchanges or self.tensors.has(fqn)):
            lines.append(self.tensors.explain(fqn))
        if fqn is None:
            lines += [
                f"pp: stage {index} on rank {one.pp_rank}: layers {one.first_layer} to {one.last_layer}"
                for index, one in enumerate(self.stages)
            ]
        lines += exchange_lines(exchanges)
        lines += self.activations.lines() if fqn is None else ()
        if not lines:
            raise KeyError(f"no boundary {fqn!r}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The plan for `plan.json`: numbers, lists and text alone."""
        boundaries = () if self.tensors is None else self.tensors.boundaries
        return {
            "sizes": self.sizes.all,
            "total_parameters": self.total_parameters,
            "local_parameters": list(_runs(self.layout.by_rank)),
            "parameters": [
                {
                    "name": one.fqn,
                    "shape": list(one.shape),
                    "pp_ranks": list(one.pp_ranks),
                    "placements": one.placements,
                }
                for one in self.layout.parameters
            ],
            "stages": [asdict(one) for one in self.stages],
            "boundaries": [_boundary(one) for one in boundaries],
            "exchanges": [asdict(one) for one in self.exchanges],
            "activations": self.activations.as_dict(),
        }

    def local_parameters(self, rank: int) -> int:
        """The elements that a rank holds. See `ModelLayout.local_parameters`."""
        return self.layout.local_parameters(rank)


def plan_model(
    model: PreTrainedModel,
    sizes: ParallelSizes,
    overrides: Sequence[PlanOverride] = (),
    settings: Settings | None = None,
) -> ModelPlan:
    """The plan of `model`, on whatever device, for a run of these sizes; nothing of the model is changed.

    Its cost grows with the modules of the model, not with the ranks. `overrides` are the recipe's `plan_overrides`,
    `settings` its other sections that matter.

    Raises:
        InputError: heads, widths or experts can't be shared by so many ranks, or the recipe's contracts don't fit.
    """
    settings = settings or Settings()
    # With adapters around them the embedding and the head are whole on each rank; no module is cut beside its copy.
    kept = (*saved_modules(model).values(), model.get_input_embeddings(), model.get_output_embeddings())
    with plain_modules(model, but=kept):
        contracts = contracts_of(model, overrides, sizes)
    stages = plan_stages(model, sizes, settings.accelerator) if sizes.pp > 1 else None
    tensors = None
    if sizes.tp > 1:
        with plain_modules(model, but=kept):
            tensors = derive_plan(
                model,
                sizes.tp,
                contracts,
                sequence_parallel=settings.accelerator.sequence_parallel,
                loss_parallel=settings.accelerator.loss_parallel,
                first_layers=(0,) if stages is None else [one.first_layer for one in stages.stages],
            )
        tensors = with_adapters(model, tensors)
    experts = experts_of(model, sizes.ep) if sizes.ep > 1 else {}
    spread = tuple(fqn for fqn, module in experts.items() if not experts_kept_whole(fqn, module, contracts))
    if experts and not spread:
        message = "every module of experts is kept whole, and so has no effect"
        raise InputError(Problem(message, path="accelerator.ep_size", hint="remove it, or leave some to be spread"))
    layouts = _layouts(model, sizes, tensors, spread)
    if stages is not None:
        layouts = (replace(one, pp_ranks=stages.ranks_of(one.fqn)) for one in layouts)
    layout = ModelLayout(sizes, tuple(layouts))
    exchanges = tuple(exchanges_of(model, layout, spread, settings))
    return ModelPlan(sizes, layout, tensors, spread, exchanges, () if stages is None else stages.stages)


def _layouts(
    model: nn.Module, sizes: ParallelSizes, tensors: ShardingPlan | None, experts: Sequence[str]
) -> Iterator[ParameterLayout]:
    spread = frozenset(experts)
    by_tensors = _tensor_cuts(tensors)
    axes = axis_sizes(sizes)
    for fqn, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if fqn.rpartition(".")[0] in spread:
            cuts = _expert_cuts(shape, axes)
        else:
            cuts = fsdp_cuts(by_tensors.get(fqn, ()), shape, axes["fsdp"])
        yield ParameterLayout(fqn, shape, cuts)


def _tensor_cuts(tensors: ShardingPlan | None) -> Mapping[str, tuple[Cut, ...]]:
    if tensors is None:
        return {}
    return {
        f"{boundary.fqn}.{one.name}": (Cut("tp", one.shard_dim, tensors.tp_size),)
        for boundary in tensors.boundaries
        for one in boundary.parameters
        if one.shard_dim is not None
    }


def _expert_cuts(shape: tuple[int, ...], axes: Mapping[str, int]) -> tuple[Cut, ...]:
    num_own, num_shards = shape[0] // axes["ep"], axes["efsdp"]
    dim = expert_shard_dim(num_own, shape, num_shards)
    if dim is None:
        raise InputError(unsharable_experts(num_own, shape[-1], num_shards))
    among_holders = (Cut("efsdp", dim, num_shards),) if num_shards > 1 else ()
    return (Cut("ep", 0, axes["ep"]), *among_holders)


def _boundary(one: Boundary) -> dict[str, Any]:
    edges = [
        {
            "name": edge.name,
            "side": "output" if edge is one.output else "input",
            "src": str(edge.src),
            "dst": str(edge.dst),
            "collectives": [
                {"name": done.name, "direction": done.direction, "bytes_per_token": done.bytes_per_token}
                for done in edge.collectives
            ],
        }
        for edge in one.edges
    ]
    return {"name": one.fqn, "type": one.module_type, "kind": one.kind, "note": one.note, "edges": edges}


def _runs(by_rank: Sequence[int]) -> Iterator[dict[str, int]]:
    """Neighbouring ranks that hold equally much together."""
    first = 0
    for number, ranks in groupby(by_rank):
        last = first + len(list(ranks)) - 1
        yield {"first_rank": first, "last_rank": last, "parameters": number}
        first = last + 1
