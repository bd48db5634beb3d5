"""The embedding and the head of a model whose vocabulary tensor ranks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from hp_core.parallel.plan.edge import REPLICATE, Edge, shard
from hp_core.parallel.setup import DistributedSetup
from hp_core.parallel.tensor.collectives import cross
from hp_core.parallel.tensor.place import in_place

_WHOLE = Edge("", shard(0), REPLICATE, 0, 0)
_ALL_LOGITS = Edge("", shard(-1), REPLICATE, 0, 0)


@dataclass(frozen=True, eq=False)
class VocabularyShard:
    """The tokens of the vocabulary that a rank has: consecutive ones, on the last ranks perhaps fewer.

    Args:
        size: of the whole vocabulary.
        group: the ranks that share it.
    """

    size: int
    group: dist.ProcessGroup

    @property
    def longest(self) -> int:
        """How many tokens the first rank has, and no rank more."""
        return -(-self.size // self.group.size())

    @property
    def start(self) -> int:
        """This rank's first token."""
        return min(self.group.rank() * self.longest, self.size)

    @property
    def num_own(self) -> int:
        """How many tokens this rank has."""
        return min(self.longest, self.size - self.start)

    def own(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each token is among this rank's, 0 for those of others, and which ones are this rank's."""
        places = tokens - self.start
        is_own = (places >= 0) & (places < self.num_own)
        return torch.where(is_own, places, 0), is_own


class VocabularyEmbedding:
    """Takes the place of an embedding's forward: each rank looks up its own tokens, and the others add nothing."""

    def __init__(self, embedding: nn.Embedding, output: Edge, group: dist.ProcessGroup) -> None:
        self._embedding = embedding
        self._output = output
        self._shard = VocabularyShard(embedding.num_embeddings, group)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """The embeddings of tokens of any shape, whole on every rank."""
        places, is_own = self._shard.own(input)
        padding = self._embedding.padding_idx
        if padding is not None:
            padding -= self._shard.start
            padding = padding if 0 <= padding < self._shard.num_own else None
        found = F.embedding(places, own_rows(self._embedding.weight), padding)
        return cross(found.masked_fill(~is_own.unsqueeze(-1), 0), self._output, self._shard.group)


class VocabularyHead:
    """Takes the place of a head's forward: each rank computes the logits of its own tokens, and then gathers them all.

    A loss may compute with a part of the head, or with the whole, instead; see `answered`.
    """

    def __init__(self, head: nn.Linear, hidden: Edge, group: dist.ProcessGroup) -> None:
        self._head = head
        self._hidden = hidden
        self.shard = VocabularyShard(head.out_features, group)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """The logits of all tokens."""
        logits = self.answered(input, logits_of, on_shards=True)
        return cross(logits, _ALL_LOGITS, self.shard.group, self.shard.size)

    def answered(
        self,
        hidden: torch.Tensor,
        compute: Callable[[torch.Tensor, nn.Linear], torch.Tensor],
        *,
        on_shards: bool,
    ) -> torch.Tensor:
        """What `compute` makes of the hidden states and the head, which has this rank's rows while it runs, or all.

        Args:
            hidden: (..., features), the same on every rank.
            compute: with the rank's own rows its result is the rank's own too, and so is the gradient of `hidden`,
                which is then summed over the ranks; with all rows, every rank computes the same.
            on_shards: whether the head has the rank's own rows alone.
        """
        head = self._head
        rows = {"weight": own_rows(head.weight)}
        if head.bias is not None:
            rows["bias"] = own_rows(head.bias)
        if on_shards:
            hidden = cross(hidden, self._hidden, self.shard.group)
        else:
            rows = {name: cross(one, _WHOLE, self.shard.group, self.shard.size) for name, one in rows.items()}
        with in_place({(head, name): one for name, one in rows.items()}):
            return compute(hidden, head)


def logits_of(hidden: torch.Tensor, head: nn.Linear) -> torch.Tensor:
    """The logits of whatever rows the head has."""
    return F.linear(hidden, head.weight, head.bias)


def own_rows(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a parameter that is cut by vocabulary."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def is_loss_parallel(distributed_setup: object) -> bool:
    """Whether a run computes its loss on parts of the vocabulary; without a run's setup it doesn't."""
    return isinstance(distributed_setup, DistributedSetup) and distributed_setup.accelerator.loss_parallel
