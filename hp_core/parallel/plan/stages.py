"""Which pipeline ranks hold a parameter: its layer's, or those of an end of the model."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from hp_core.config.models import AcceleratorConfig
from hp_core.parallel.pipeline.schedules import SCHEDULES, num_stages
from hp_core.parallel.pipeline.stages import Anatomy, split_layers
from hp_core.parallel.sizes import ParallelSizes


@dataclass(frozen=True)
class StagePlan:
    """A stage of a pipeline: the rank along `pp` that holds it, and the numbers of its layers."""

    pp_rank: int
    first_layer: int
    last_layer: int

    @property
    def layers(self) -> range:
        """The numbers as a range."""
        return range(self.first_layer, self.last_layer + 1)


@dataclass(frozen=True)
class StagesPlan:
    """The stages of a model in order, and where it has its parts."""

    stages: tuple[StagePlan, ...]
    stack: str
    embedding: str
    is_tied: bool

    def ranks_of(self, fqn: str) -> tuple[int, ...]:
        """The ranks along `pp` that hold a parameter: two, where a weight is embedding and head."""
        first, last = self.stages[0].pp_rank, self.stages[-1].pp_rank
        if fqn.startswith(f"{self.stack}."):
            layer = int(fqn[len(self.stack) + 1 :].partition(".")[0])
            return tuple(one.pp_rank for one in self.stages if one.first_layer <= layer <= one.last_layer)
        if fqn.startswith(f"{self.embedding}."):
            return (first, last) if self.is_tied and first != last else (first,)
        return (last,)


def plan_stages(model: PreTrainedModel, sizes: ParallelSizes, accelerator: AcceleratorConfig) -> StagesPlan:
    """The stages of a pipeline.

    Raises:
        InputError: the model can't be cut into so many.
    """
    anatomy, schedule = Anatomy.of(model), SCHEDULES[accelerator.pp_schedule]
    split = split_layers(model, anatomy, num_stages(accelerator, sizes.pp), accelerator.pp_layers)
    stages = tuple(
        StagePlan(schedule.rank_of(index, sizes.pp), layers.start, layers.stop - 1)
        for index, layers in enumerate(split)
    )
    return StagesPlan(
        stages, f"{anatomy.base}.{anatomy.layers}", f"{anatomy.base}.{anatomy.embedding}", anatomy.is_tied
    )
