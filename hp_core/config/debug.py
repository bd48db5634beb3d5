"""The recipe's section on finding faults, at the cost of speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from hp_core.config.base import Conflict, Section, value_at


class DebugConfig(Section):
    """Checks that find where numbers that aren't finite come from, at the cost of speed."""

    check_outputs: bool = Field(
        False, description="End the run at the first module whose output isn't finite, and name the module."
    )
    detect_anomaly: bool = Field(
        False,
        description="End the run at the first operator whose gradient is NaN, and show where the forward pass called "
        "it (torch's anomaly detection).",
    )

    @property
    def is_on(self) -> bool:
        """Whether anything is to be checked."""
        return self.check_outputs or self.detect_anomaly


def debug_conflicts(recipe: Mapping[str, Any]) -> Iterator[Conflict]:
    """Yield one for each check that would end the run at a step that is to be skipped, or that torch can't make.

    `recipe` has the sections `debug`, `training`, `compile` and `accelerator`, or some of them.
    """
    asked = [key for key in DebugConfig.model_fields if value_at(recipe, "debug", key) is True]
    for key in asked:
        if value_at(recipe, "training", "nonfinite") == "skip":
            message = "ends the run at what training.nonfinite: skip would leave out"
            yield Conflict(message, f"debug.{key}", "write training.nonfinite: stop")
        if value_at(recipe, "compile", "mode") not in (None, "off"):
            message = "finds nothing inside a layer that is compiled, which runs as a whole"
            yield Conflict(message, f"debug.{key}", "write compile.mode: off")
    for size in ("tp_size", "ep_size"):
        ranks = value_at(recipe, "accelerator", size)
        if isinstance(ranks, int) and ranks > 1 and "detect_anomaly" in asked:
            message = f"torch can't check gradients of weights that ranks share, as with accelerator.{size} {ranks}"
            yield Conflict(message, "debug.detect_anomaly", "write debug.check_outputs: true")
