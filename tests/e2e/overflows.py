"""A plugin: the sixth output of an attention on the last rank has an infinite number and two that are none."""

from typing import Any

import torch

from hp_core import hookimpl


@hookimpl
def on_train_start(run: Any) -> None:
    """Wrap the attention of the last layer of the tiny models."""
    attention = run.model.model.layers[-1].self_attn
    forward, count = attention.forward, 0

    def fault(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        output, weights = forward(*args, **kwargs)
        if run.setup.rank == run.setup.world_size - 1 and count == 6:
            faults = torch.zeros_like(output)
            faults[0, 0, 0] = torch.inf
            faults[0, 1, :2] = torch.nan
            output = output + faults
        return output, weights

    attention.forward = fault
