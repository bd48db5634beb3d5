"""What runs a module's forward again or swaps what it keeps, and what of the forward stays inside."""

from __future__ import annotations

from typing import Any

from torch import nn

from hp_core.model.activation_checkpoint import Recomputed
from hp_core.model.activation_swap import Swapped


def holder_of(module: nn.Module) -> Any:
    """What has the forward that is run again and swapped as its own `forward`: the module, if nothing is.

    What takes the place of a forward and brings its own parameters, or parts of inputs, is put there, so that it does
    so whenever the forward is run.
    """
    holder: Any = module
    while isinstance(holder.forward, (Recomputed, Swapped)):
        holder = holder.forward
    return holder
