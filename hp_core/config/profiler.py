"""The recipe's section on what is recorded of single steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from hp_core.config.base import Conflict, Section, value_at

NO_SNAPSHOT = "only CUDA's allocator keeps a history, and the run is on the CPU"


class ProfilerConfig(Section):
    """Steps of which a trace is written: what each operator took, on the host and on the device."""

    start_step: int | None = Field(None, ge=1, description="The first step to profile; null profiles none.")
    stop_step: int | None = Field(None, ge=1, description="The last step to profile; null is `start_step`.")
    ranks: list[Annotated[int, Field(ge=0)]] = Field(
        [0], min_length=1, description="The ranks to profile; each writes files of its own."
    )
    record_shapes: bool = Field(False, description="Record the shapes of each operator's inputs.")
    with_stack: bool = Field(False, description="Record where in the python code each operator was called, slowly.")
    profile_memory: bool = Field(False, description="Record what operators allocate and free.")
    memory_snapshot: bool = Field(
        False, description="Write the history of the CUDA allocator, too, for docs.pytorch.org/memory_viz."
    )

    @property
    def last_step(self) -> int | None:
        """The last step to profile, or None if there is none."""
        return self.start_step if self.stop_step is None else self.stop_step

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        """Yield one for each key without effect, for steps in the wrong order, and for a rank that is named twice."""
        start, stop, ranks = values.get("start_step"), values.get("stop_step"), values.get("ranks")
        if start is None:
            for key, field in cls.recipe_keys().items():
                if values.get(key) not in (None, field.default):
                    yield Conflict("has no effect without start_step", key, f"write start_step, or remove '{key}'")
        elif isinstance(start, int) and isinstance(stop, int) and stop < start:
            yield Conflict(f"step {stop} comes before start_step {start}", "stop_step")
        if isinstance(ranks, list):
            for rank in sorted({rank for rank in ranks if isinstance(rank, int) and ranks.count(rank) > 1}):
                yield Conflict(f"names rank {rank} more than once", "ranks")


def profiler_conflicts(recipe: Mapping[str, Any]) -> Iterator[Conflict]:
    """Yield one for steps behind the run's last, and for a snapshot of CUDA's memory on the CPU.

    `recipe` has the sections `profiler` and `training`, or some of them.
    """
    key = "start_step" if value_at(recipe, "profiler", "stop_step") is None else "stop_step"
    step = value_at(recipe, "profiler", key)
    for length in ("train_iters", "stop_after"):
        last = value_at(recipe, "training", length)
        if isinstance(step, int) and isinstance(last, int) and step > last:
            yield Conflict(f"the run ends with step {last} (training.{length})", f"profiler.{key}")
            break
    if value_at(recipe, "profiler", "memory_snapshot") is True and value_at(recipe, "training", "device") == "cpu":
        yield Conflict(
            NO_SNAPSHOT, "profiler.memory_snapshot", "write profile_memory: true for what operators allocate"
        )
