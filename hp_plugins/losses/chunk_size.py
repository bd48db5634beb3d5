"""How many tokens' logits a loss holds at a time: a number, or as many as fit a memory budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field

from hp_core.errors import ArgumentError, InputError, Problem
from hp_plugins.losses.logits import LogitTransform

MIB = 2**20
DEFAULT_BUDGET_MIB = 512

ChunkSize = Annotated[
    Annotated[int, Field(ge=1)] | Literal["auto"],
    Field(description="Tokens whose logits are held at a time; auto: as many as memory_budget_mib holds."),
]
MemoryBudget = Annotated[
    Annotated[int, Field(ge=1)] | None,
    Field(description=f"MiB for the buffers of a chunk where chunk_size is auto; {DEFAULT_BUDGET_MIB} if left out."),
]


@dataclass(frozen=True)
class Chunks:
    """What a recipe says of the chunks.

    Raises:
        ArgumentError: it gives both a size and the budget that would choose one.
    """

    size: int | Literal["auto"] = "auto"
    budget_mib: int | None = None

    def __post_init__(self) -> None:
        if self.size != "auto" and self.budget_mib is not None:
            message = f"a budget chooses the chunk size, which is {self.size} already"
            raise ArgumentError("memory_budget_mib", message, "leave it out, or set loss_fn.chunk_size=auto")

    def num_tokens(
        self, weight: torch.Tensor, transform: LogitTransform, num_buffers: int = 1, num_classes: int | None = None
    ) -> int:
        """The tokens of a chunk; arguments and errors are those of `fitting_chunk`."""
        if self.size != "auto":
            return self.size
        return fitting_chunk(weight, transform, self.budget_mib or DEFAULT_BUDGET_MIB, num_buffers, num_classes)


def fitting_chunk(
    weight: torch.Tensor,
    transform: LogitTransform,
    budget_mib: int,
    num_buffers: int = 1,
    num_classes: int | None = None,
) -> int:
    """How many tokens fit the budget with their logits, with a soft cap its slope, and off the CPU a copy for products.

    Args:
        weight: the head's, (classes, features).
        transform: what the model does to the head's output.
        budget_mib: MiB for the buffers of a chunk.
        num_buffers: how many of the logits' size the objective needs, the logits themselves included.
        num_classes: how many of the classes are computed at once; all if left out.

    Raises:
        InputError: not even one token's do.
    """
    bytes_per_value = 8 if weight.dtype == torch.float64 else 4
    bytes_per_value *= num_buffers + (transform.softcap is not None)
    if weight.device.type != "cpu":
        bytes_per_value += 2
    row = bytes_per_value * (len(weight) if num_classes is None else num_classes)
    if row > budget_mib * MIB:
        needed = -(-row // MIB)
        message = f"the logits of one token take {needed} MiB, more than the budget of {budget_mib}"
        hint = f"set loss_fn.memory_budget_mib={needed}"
        raise InputError(Problem(message, path="loss_fn.memory_budget_mib", hint=hint))
    return budget_mib * MIB // row
