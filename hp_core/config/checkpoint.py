"""The recipe's `checkpoint` section: when to save, what to keep, and where to start from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from hp_core.config.base import Conflict, Section, value_at


class KeepBestConfig(Section):
    """Checkpoints to keep because a metric is best there, besides the newest ones."""

    metric: str | None = Field(
        None,
        min_length=1,
        description="What to judge by, as `metrics.jsonl` calls it: `eval_loss`, `loss`; null judges by nothing.",
    )
    mode: Literal["min", "max"] = Field("min", description="Whether the smallest or the largest value is best.")
    count: int = Field(1, ge=1, description="How many to keep.")

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        """Yield one for each key that would have no effect."""
        if values.get("metric") is None:
            for key in ("mode", "count"):
                value, default = values.get(key), cls.model_fields[key].default
                if value not in (None, default):
                    hint = f"write metric: eval_loss, or remove '{key}'"
                    yield Conflict(f"{value!r} has no effect without a metric", key, hint)


class CheckpointConfig(Section):
    """When to save, what to keep, and where to start from."""

    save_every: int = Field(0, ge=0, description="Steps between two checkpoints; 0 saves none on the way.")
    save_last: bool = Field(True, description="Save after the last step.")
    async_save: bool = Field(
        False,
        alias="async",
        description="Write in the background, from a copy made at the step, while training goes on.",
    )
    keep_last: int | None = Field(
        None, ge=1, description="How many of the newest checkpoints to keep; null keeps all of them."
    )
    keep_every: int | None = Field(
        None, ge=1, description="Keep those of every so many steps as well; a multiple of `save_every`."
    )
    keep_best: KeepBestConfig = Field(KeepBestConfig(), description="Keep those as well where a metric is best.")
    resume: str | None = Field(
        None,
        min_length=1,
        description="Where to continue: `latest` (the newest complete checkpoint of `output_dir`, step 0 if there is "
        "none), or the path of a checkpoint or run.",
    )
    allow_plugin_changes: bool = Field(False, description="Resume although the plugins or their versions have changed.")

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        """Yield one for each key that would have no effect, or less than it says."""
        asked = {"keep_every": values.get("keep_every"), "keep_best": value_at(values, "keep_best", "metric")}
        for key, value in asked.items():
            if value is not None and values.get("keep_last") is None:
                hint = f"write keep_last: 1, or remove '{key}'"
                yield Conflict("has no effect without keep_last, for everything is kept", key, hint)
        every, keep_every = _count(values.get("save_every")), _count(asked["keep_every"])
        if keep_every and (not every or keep_every % every):
            saved = f"every {every} steps are saved" if every else "none is saved on the way"
            hint = "write a multiple of save_every"
            yield Conflict(f"{keep_every} is no step that is saved: {saved}", "keep_every", hint)


def metric_conflicts(recipe: Mapping[str, Any]) -> Iterator[Conflict]:
    """Yield one if the checkpoints to keep are judged by a metric that isn't known whenever one is saved.

    `recipe` has the sections `checkpoint`, `evaluation` and `training`, or some of them.
    """
    key = "checkpoint.keep_best.metric"
    metric = value_at(recipe, "checkpoint", "keep_best", "metric")
    save_every = _count(value_at(recipe, "checkpoint", "save_every"))
    if not isinstance(metric, str) or not save_every:
        return
    if metric.startswith("test_"):
        yield Conflict(f"{metric!r} is measured once, after the last step", key, "write eval_loss")
    of_evaluation = metric.startswith("eval_")
    name = "evaluation.every" if of_evaluation else "training.log_every"
    default = 0 if of_evaluation else 1
    every = _count(value_at(recipe, *name.split(".")), default)
    if not every or save_every % every:
        how = f"{name} is {every}, so {metric!r} isn't known at every step that is saved (save_every {save_every})"
        yield Conflict(how, key, f"write {name}: {save_every}")


def _count(value: Any, default: int = 0) -> int:
    """The value if it is a whole number, or 0 where another error says that it isn't."""
    if value is None:
        return default
    return value if type(value) is int and value > 0 else 0
