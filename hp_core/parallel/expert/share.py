"""The tokens of a tensor rank: all ranks of its group hold the same, and each sends its own part to the experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hp_core.parallel.plan.edge import REPLICATE, Edge, shard
from hp_core.parallel.tensor.collectives import cross

_IN = Edge("hidden_states", REPLICATE, shard(0), features=0, itemsize=0)
_OUT = Edge("", shard(0), REPLICATE, features=0, itemsize=0)


@dataclass(frozen=True, eq=False)
class TokenShare:
    """One rank's part of `num_tokens` tokens that all ranks of `group` hold: the last ones may have fewer, or none."""

    num_tokens: int
    group: dist.ProcessGroup

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rank's part of (tokens, ...); the gradients of all parts come back to every rank."""
        part = cross(tensor, _IN, self.group)
        own = min(len(part), max(0, self.num_tokens - self.group.rank() * len(part)))
        return part[:own]

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """(tokens, ...) of all ranks' parts; a part has the gradient of its own tokens."""
        most = -(-self.num_tokens // self.group.size())
        filled_up = F.pad(part, (*(0, 0) * (part.ndim - 1), 0, most - len(part)))
        # What FSDP hooks must be no view: whoever adds to it in place would drop the hook.
        return cross(filled_up, _OUT, self.group, self.num_tokens).clone()
