"""Attention of a rank's own tokens over keys and values that pass by: no rank ever holds those of all.

Liu et al. 2023 (Ring Attention): blocks of keys and values travel from rank to rank, and the softmax goes on from block
to block. Each block is computed in tiles, of which those that nobody sees are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from hp_core.parallel.context.sequence import SequenceSlice, sight


@torch.compiler.disable(reason="keys and values travel meanwhile")  # type: ignore[untyped-decorator]
def ring_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequence_slice: SequenceSlice,
    options: dict[str, Any],
) -> torch.Tensor:
    """(rows, own tokens, heads, features) of the values; the arguments are those of `ContextAttention`.

    Scores, sums and the gradients that travel are fp32, whatever the inputs are.
    """
    dropout, scaling = options.get("dropout", 0.0), options.get("scaling")
    ring = _Ring(
        sequence_slice,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=options.get("sliding_window"),
        dropout=dropout,
        seed=int(torch.randint(2**62, ())) if dropout else 0,
    )
    grouped = query.unflatten(1, (key.shape[1], -1))
    output: torch.Tensor = _RingAttention.apply(grouped, key, value, ring)  # type: ignore[no-untyped-call]
    return output.flatten(1, 2).transpose(1, 2).contiguous()


@dataclass(frozen=True, eq=False)
class _Pair:
    """A tile of own queries, and one of the keys of a block that some of them see.

    Args:
        queries: where the rank holds the queries.
        keys: where the block holds the keys.
        mask: which of the keys each query sees, (rows, 1, 1, queries, keys); None where that is all.
        dropout: the probability of dropping a weight.
        seed: what is dropped depends on it alone, so that the backward pass drops the same.
    """

    queries: slice
    keys: slice
    mask: torch.Tensor | None
    dropout: float
    seed: int

    def scores(self, query: torch.Tensor, key: torch.Tensor, scaling: float) -> torch.Tensor:
        """(rows, key heads, queries of a head, queries, keys) of the tiles; minus infinity where one doesn't see."""
        scores = torch.einsum("bhgqd,bhkd->bhgqk", query * scaling, key)
        return scores if self.mask is None else scores.masked_fill_(~self.mask, -torch.inf)

    def kept(self, weights: torch.Tensor) -> torch.Tensor:
        """What each weight is multiplied with: 0, or what makes up for those that are."""
        generator = torch.Generator(weights.device).manual_seed(self.seed)
        drawn = torch.rand(weights.shape, generator=generator, device=weights.device)
        return (drawn >= self.dropout).to(weights.dtype) / (1 - self.dropout)


@dataclass(frozen=True, eq=False)
class _Ring:
    """One attention over a sequence that ranks share; see `ring_attention`."""

    sequence_slice: SequenceSlice
    scaling: float
    window: int | None
    dropout: float
    seed: int

    @property
    def group(self) -> dist.ProcessGroup:
        return self.sequence_slice.group

    def blocks(self, block: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The blocks of all ranks as they come by, the own first, each with the rank that it is from."""
        rank, size = self.group.rank(), self.group.size()
        for step in range(size - 1):
            passing = _Passing(block, self.group)
            yield (rank - step) % size, block
            block = passing.received()
        yield (rank + 1) % size, block

    def pairs(self, source: int) -> Iterator[_Pair]:
        """The pairs of tiles of own queries and of the keys of rank `source`, without those that see nothing."""
        whole = self.sequence_slice
        own, others = whole.tiles[self.group.rank()], whole.tiles[source]
        start, most = source * len(whole.positions), max(map(len, whole.tiles))
        positions = whole.all_positions[start : start + len(whole.positions)]
        documents = whole.all_documents[:, start : start + len(whole.positions)]
        for index, queries in enumerate(own):
            for other_index, keys in enumerate(others):
                sees = queries.sees(keys, self.window)
                if sees == "none":
                    continue
                mask = None
                if sees == "some":
                    mine, theirs = queries.tokens, keys.tokens
                    own_tokens = whole.positions[mine], whole.documents[:, mine]
                    mask = sight(*own_tokens, positions[theirs], documents[:, theirs], self.window)[:, :, None]
                number = (source * most + index) * most + other_index
                yield _Pair(queries.tokens, keys.tokens, mask, self.dropout, self.seed + number)


class _RingAttention(torch.autograd.Function):
    """Queries are (rows, key heads, queries of a head, own tokens, features), keys (rows, heads, tokens, features)."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: _Ring) -> torch.Tensor:
        found = _Softmax.empty(query, value.shape[-1])
        for source, block in ring.blocks(torch.cat([key, value], dim=-1)):
            keys, values = _split(block, key, value)
            for pair in ring.pairs(source):
                found.add(pair, query, keys, values, ring.scaling)
        output, log_sums = found.result()
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.ring = ring
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        """Dao et al. 2022 (FlashAttention), appendix B: the weights again from the sums that were kept.

        The gradients of a block travel with it, one rank behind the sums that are being computed, and end at home.
        """
        query, key, value, output, log_sums = ctx.saved_tensors
        ring: _Ring = ctx.ring
        gradient = outer[0].float()
        inputs = _Backward(query, gradient, (gradient * output).sum(-1), log_sums, ring.scaling)
        query_gradient = torch.zeros_like(query, dtype=torch.float32)
        travelling: _Passing | None = None
        for source, block in ring.blocks(torch.cat([key, value], dim=-1)):
            keys, values = _split(block, key, value)
            own = torch.zeros_like(block, dtype=torch.float32)
            for pair in ring.pairs(source):
                inputs.add(pair, keys, values, query_gradient, *_split(own, key, value))
            if travelling is not None:
                own += travelling.received()
            travelling = _Passing(own, ring.group)
        assert travelling is not None
        key_gradient, value_gradient = _split(travelling.received(), key, value)
        return query_gradient.to(query.dtype), key_gradient.to(key.dtype), value_gradient.to(value.dtype), None


@dataclass(frozen=True, eq=False)
class _Softmax:
    """A softmax that goes on: per query the largest score so far, the weights' sum, and the sum of weighed values."""

    largest: torch.Tensor
    total: torch.Tensor
    weighed: torch.Tensor

    @staticmethod
    def empty(query: torch.Tensor, num_features: int) -> _Softmax:
        total = query.new_zeros(query.shape[:-1], dtype=torch.float32)
        weighed = query.new_zeros((*query.shape[:-1], num_features), dtype=torch.float32)
        return _Softmax(torch.full_like(total, -torch.inf), total, weighed)

    def add(self, pair: _Pair, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> None:
        largest, total, weighed = (one[:, :, :, pair.queries] for one in (self.largest, self.total, self.weighed))
        scores = pair.scores(query[:, :, :, pair.queries].float(), keys[:, :, pair.keys].float(), scaling)
        new = torch.maximum(largest, scores.amax(-1))
        # A query that has seen nothing yet: infinities have no difference.
        base = new.masked_fill(new == -torch.inf, 0)
        weights = scores.sub_(base[..., None]).exp_()
        shrunk = (largest - base).exp_()
        total.mul_(shrunk).add_(weights.sum(-1))
        if pair.dropout:
            weights = weights * pair.kept(weights)
        values = values[:, :, pair.keys].float()
        weighed.mul_(shrunk[..., None]).add_(torch.einsum("bhgqk,bhkd->bhgqd", weights, values))
        largest.copy_(new)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention's output, and the logarithm of the sum of all exponentials. Each query sees itself at least."""
        return self.weighed / self.total[..., None], self.largest + self.total.log()


@dataclass(frozen=True, eq=False)
class _Backward:
    """What the gradients of all blocks have in common: the queries and, by query, what the forward pass left."""

    query: torch.Tensor
    gradient: torch.Tensor
    gradient_along_output: torch.Tensor
    log_sums: torch.Tensor
    scaling: float

    def add(
        self,
        pair: _Pair,
        keys: torch.Tensor,
        values: torch.Tensor,
        query_gradient: torch.Tensor,
        key_gradient: torch.Tensor,
        value_gradient: torch.Tensor,
    ) -> None:
        """Add what a pair of tiles gives to the three gradients, in place."""
        query, gradient = (one[:, :, :, pair.queries].float() for one in (self.query, self.gradient))
        along, log_sums = (one[:, :, :, pair.queries, None] for one in (self.gradient_along_output, self.log_sums))
        key, value = (one[:, :, pair.keys].float() for one in (keys, values))
        weights = pair.scores(query, key, self.scaling).sub_(log_sums).exp_()
        by_weight = torch.einsum("bhgqd,bhkd->bhgqk", gradient, value)
        used = weights
        if pair.dropout:
            kept = pair.kept(weights)
            used, by_weight = weights * kept, by_weight * kept
        value_gradient[:, :, pair.keys] += torch.einsum("bhgqk,bhgqd->bhkd", used, gradient)
        by_score = weights * (by_weight - along) * self.scaling
        query_gradient[:, :, :, pair.queries] += torch.einsum("bhgqk,bhkd->bhgqd", by_score, key)
        key_gradient[:, :, pair.keys] += torch.einsum("bhgqk,bhgqd->bhkd", by_score, query)


class _Passing:
    """A tensor on its way to the next rank, while this one computes; the one of the rank before comes."""

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        self._sent = tensor
        self._came = torch.empty_like(tensor)
        send, receive = ([0] * size for _ in range(2))
        send[(rank + 1) % size] = receive[(rank - 1) % size] = tensor.numel()
        self._work = dist.all_to_all_single(
            self._came.view(-1), tensor.view(-1), receive, send, group=group, async_op=True
        )

    def received(self) -> torch.Tensor:
        """What the rank before had; waits for it."""
        assert self._work is not None
        self._work.wait()
        return self._came


def _split(block: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of a block, or their gradients."""
    keys, values = block.split([key.shape[-1], value.shape[-1]], dim=-1)
    return keys, values
