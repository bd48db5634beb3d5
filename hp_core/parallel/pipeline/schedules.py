"""The schedules that a recipe may name, and how many micro-batches and stages each of them takes.

No torch: `hp-train check` asks before any is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hp_core.config.models import AcceleratorConfig


@dataclass(frozen=True)
class Schedule:
    """An order of the passes of all stages; torch's own, of `torch.distributed.pipelining`.

    Attributes:
        name: what a recipe calls it.
        torch_name: what torch calls it.
        stages_per_rank: what it takes where a recipe says nothing.
        placement: `loop` gives a rank every `pp_size`-th stage, `v` one from the front and its counterpart from the
            end.
    """

    name: str
    torch_name: str
    stages_per_rank: int = 1
    placement: Literal["loop", "v"] = "loop"

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights are computed later than those of inputs."""
        return self.name.endswith("zero_bubble")

    @property
    def is_interleaved(self) -> bool:
        """Whether a rank may hold more than one stage."""
        return self.stages_per_rank > 1

    def takes(self, num_micro_batches: int, pp_size: int) -> bool:
        """Whether a step may be made of so many micro-batches."""
        if self.is_interleaved and self.placement == "loop":
            return num_micro_batches % max(1, num_micro_batches // pp_size) == 0
        return True

    def at_least(self, num_micro_batches: int, pp_size: int) -> int:
        """The smallest number that it takes, from `num_micro_batches` on."""
        while not self.takes(num_micro_batches, pp_size):
            num_micro_batches += 1
        return num_micro_batches

    def rank_of(self, stage: int, pp_size: int) -> int:
        """The rank along the pipeline that holds a stage."""
        around, place = divmod(stage, pp_size)
        return pp_size - 1 - place if self.placement == "v" and around % 2 else place


SCHEDULES: Mapping[str, Schedule] = {
    one.name: one
    for one in (
        Schedule("gpipe", "GPipe"),
        Schedule("1f1b", "1F1B"),
        Schedule("interleaved_1f1b", "Interleaved1F1B", stages_per_rank=2),
        Schedule("interleaved_zero_bubble", "InterleavedZeroBubble", stages_per_rank=2),
        Schedule("zbv_zero_bubble", "ZBVZeroBubble", stages_per_rank=2, placement="v"),
    )
}


def num_stages(config: AcceleratorConfig, pp_size: int) -> int:
    """The stages of all ranks."""
    return pp_size * (config.pp_stages_per_rank or SCHEDULES[config.pp_schedule].stages_per_rank)
