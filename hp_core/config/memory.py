"""The recipe's sections on the memory that activations take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from hp_core.config.base import Conflict, Section, value_at


class ActivationCheckpointConfig(Section):
    """What the forward pass keeps for the backward pass, and what that computes again."""

    mode: Literal["off", "full", "selective", "every_n"] = Field(
        "off",
        description="`full` keeps the inputs of each layer alone, and computes the rest again; `every_n` does so in "
        "every n-th layer; `selective` keeps the results of matrix products, attention and exchanges, too.",
    )
    n: int | None = Field(None, ge=1, description="With `every_n`: of how many layers one is computed again.")
    modules: list[str] | None = Field(
        None,
        min_length=1,
        description="Patterns of the modules to compute again, by FQN (`*` crosses dots); null takes each layer.",
    )

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        """Yield one for each key without effect, and for `every_n` without its number."""
        mode = values.get("mode", "off")
        if mode == "every_n" and values.get("n") is None:
            yield Conflict("every_n needs to know n", "mode", "write n: 2, or another number")
        if mode in ("off", "full", "selective") and values.get("n") is not None:
            yield Conflict(f"has no effect with mode {mode}", "n", "write mode: every_n, or remove 'n'")
        if mode == "off" and values.get("modules") is not None:
            yield Conflict("has no effect with mode off", "modules", "write mode: full, or remove 'modules'")


class ActivationSwapConfig(Section):
    """Where what the forward pass keeps waits for the backward pass."""

    mode: Literal["off", "host"] = Field(
        "off", description="`host` moves what layers keep to the memory of the host, and back for the backward pass."
    )
    modules: list[str] | None = Field(
        None,
        min_length=1,
        description="Patterns of the modules to swap, by FQN (`*` crosses dots); null takes each layer.",
    )

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        """Yield one for modules that nothing is done to."""
        if values.get("mode", "off") == "off" and values.get("modules") is not None:
            yield Conflict("has no effect with mode off", "modules", "write mode: host, or remove 'modules'")


def checkpoint_conflicts(recipe: Mapping[str, Any]) -> Iterator[Conflict]:
    """Yield one for each way to share the work that keeps no results of single operators.

    `recipe` has the sections `activation_checkpoint` and `accelerator`, or some of them.
    """
    if value_at(recipe, "activation_checkpoint", "mode") != "selective":
        return
    if value_at(recipe, "accelerator", "cp_method") == "ring":
        why = "changes the scores of attention in place, so that they can't be kept"
        yield Conflict(f"cp_method ring {why}", "activation_checkpoint.mode", "write mode: full")
    schedule = value_at(recipe, "accelerator", "pp_schedule")
    if isinstance(schedule, str) and schedule.endswith("zero_bubble"):
        why = "goes through each layer backward twice, and what is kept can be used once"
        yield Conflict(f"pp_schedule {schedule} {why}", "activation_checkpoint.mode", "write mode: full")
