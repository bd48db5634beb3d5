"""Whether a model that a builder calls finished is split as the run's sizes say."""

from __future__ import annotations

from torch import nn

from hp_core.errors import InputError, Problem
from hp_core.parallel.context.attention import require_context_attention
from hp_core.parallel.expert.experts import require_spread
from hp_core.parallel.fsdp import require_sharded
from hp_core.parallel.pipeline.runner import pipeline_of
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
    require_spread(model, setup)
    if setup.sizes.pp > 1 and pipeline_of(model) is None:
        message = f"every pipeline rank holds the whole {type(model).__name__}"
        hint = "a model builder finishes its skeleton with hp_core.finish_model(model, distributed_setup)"
        raise InputError(Problem(message, path="accelerator.pp_size", hint=hint))
