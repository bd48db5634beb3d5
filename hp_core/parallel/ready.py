"""Whether a model that a builder calls finished is split as the run's sizes say."""

from __future__ import annotations

from torch import nn

from hp_core.parallel.context.attention import require_context_attention
from hp_core.parallel.fsdp import require_sharded
from hp_core.parallel.setup import DistributedSetup
from hp_core.parallel.tensor.apply import require_shared


def require_split(model: nn.Module, setup: DistributedSetup) -> None:
    """Refuse a model that would train on wrong numbers, because its builder left a parallel axis out.

    Raises:
        InputError: its attention sees this rank's part of a sequence alone, or every tensor rank computes all of it.
        RunError: its gradients would not be added up over the ranks.
    """
    require_sharded(model, setup)
    require_context_attention(model, setup)
    require_shared(model, setup)
