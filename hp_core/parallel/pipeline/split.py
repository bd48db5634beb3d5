"""Which layers a stage holds: given by the recipe, or so that the slowest stage is as fast as can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn

from hp_core.parallel.expert.dispatch import num_experts_of


@runtime_checkable
class ChoosesExperts(Protocol):
    """A configuration that says how many experts a token is sent to."""

    num_experts_per_tok: int


@dataclass(frozen=True)
class Costs:
    """What a token costs in each part of a model, in multiply-adds of its weights (attention scores left out)."""

    embedding: int
    layers: tuple[int, ...]
    head: int

    def of_stage(self, layers: range) -> int:
        """What it costs in a stage: the first also embeds, and the last has the head."""
        first = self.embedding if layers.start == 0 else 0
        last = self.head if layers.stop == len(self.layers) else 0
        return first + sum(self.layers[index] for index in layers) + last


def cost_of(module: nn.Module, config: object) -> int:
    """The weights that a token is multiplied with: of a mixture, those of the experts that are chosen for it."""
    total = 0
    for part in module.modules():
        number = num_experts_of(part)
        for parameter in part.parameters(recurse=False):
            is_shared_out = number is not None and parameter.ndim > 2 and len(parameter) == number
            if is_shared_out and isinstance(config, ChoosesExperts):
                total += parameter.numel() // len(parameter) * config.num_experts_per_tok
            else:
                total += parameter.numel()
    return total


def balanced(costs: Costs, num_stages: int) -> list[range]:
    """The layers of each stage, at least one, so that the costliest stage costs least.

    Among the splits that are equally good, the one whose other stages are most even wins, and then that with more
    layers in front.
    """
    num_layers = len(costs.layers)
    # The best (cost of the costliest stage, sum of squares) of the layers from `start` on in so many stages.
    best: dict[tuple[int, int], tuple[int, int, int]] = {}
    for stages in range(1, num_stages + 1):
        for start in range(num_layers - stages, -1, -1):
            if stages == 1:
                cost = costs.of_stage(range(start, num_layers))
                best[start, 1] = (cost, cost * cost, num_layers)
                continue
            options = []
            for stop in range(start + 1, num_layers - stages + 2):
                cost = costs.of_stage(range(start, stop))
                worst, squares, _ = best[stop, stages - 1]
                options.append((max(cost, worst), squares + cost * cost, -stop))
            worst, squares, negative = min(options)
            best[start, stages] = (worst, squares, -negative)
    found, start = [], 0
    for stages in range(num_stages, 0, -1):
        stop = best[start, stages][2]
        found.append(range(start, stop))
        start = stop
    return found


def written(layers: Sequence[int]) -> list[range]:
    """The layers of each stage, from their numbers."""
    found, start = [], 0
    for number in layers:
        found.append(range(start, start + number))
        start += number
    return found
