"""Where a tensor's placement changes, both passes do what the placements say."""

from __future__ import annotations

import pytest
import torch

from hp_core.config.models import AcceleratorConfig
from hp_core.parallel.plan.edge import PARTIAL, REPLICATE, Edge, Placement, conversion, shard
from hp_core.parallel.tensor.collectives import cross
from hp_core.testing.ranks import run_ranks
from tests.model.tiny import a_setup

TP2 = AcceleratorConfig(tp_size=2)


@pytest.mark.parametrize(
    ("src", "dst", "is_shared", "collectives"),
    [
        (REPLICATE, REPLICATE, True, ["all_reduce in backward, 128 bytes a token"]),
        (REPLICATE, REPLICATE, False, []),
        (PARTIAL, REPLICATE, False, ["all_reduce in forward, 128 bytes a token"]),
        (
            shard(1),
            REPLICATE,
            True,
            ["all_gather in forward, 128 bytes a token", "reduce_scatter in backward, 128 bytes a token"],
        ),
        (shard(1), REPLICATE, False, ["all_gather in forward, 128 bytes a token"]),
        (
            PARTIAL,
            shard(1),
            False,
            ["reduce_scatter in forward, 128 bytes a token", "all_gather in backward, 128 bytes a token"],
        ),
        (REPLICATE, shard(1), False, ["all_gather in backward, 128 bytes a token"]),
        (shard(1), shard(1), True, []),
        (
            shard(1),
            shard(2),
            False,
            ["all_to_all in forward, 128 bytes a token", "all_to_all in backward, 128 bytes a token"],
        ),
    ],
)
def test_the_collectives_follow_from_the_placements(src, dst, is_shared, collectives):
    assert list(map(str, Edge("x", src, dst, 32, 4, is_shared).collectives)) == collectives


def test_summands_are_made_of_nothing():
    with pytest.raises(ValueError, match="replicate can't become partial"):
        conversion(REPLICATE, PARTIAL)
    with pytest.raises(ValueError, match=r"shard\(1\) can't become partial"):
        conversion(shard(1), PARTIAL)


@pytest.mark.parametrize("placement", [REPLICATE, PARTIAL, shard(0), shard(-1)])
def test_a_placement_is_read_as_it_is_written(placement):
    assert Placement.parse(str(placement)) == placement


@pytest.mark.parametrize("text", ["shard", "shard()", "shard(a)", "Replicate", ""])
def test_other_words_are_no_placement(text):
    with pytest.raises(ValueError, match="expected 'replicate', 'partial' or"):
        Placement.parse(text)


# Of 2 rows, 3 tokens and 2 features; rank r of 2 has r + 1 times as much where they differ.
WHOLE = torch.arange(12.0).view(2, 3, 2)
TOKENS = (WHOLE[:, :2], torch.cat([WHOLE[:, 2:], torch.zeros(2, 1, 2)], dim=1))
FEATURES = (WHOLE[..., :1], WHOLE[..., 1:])
TIMES = (1.0, 2.0)


def crossed_on_ranks(environment, src, dst, is_shared, length):
    with a_setup(environment, accelerator=TP2) as setup:
        rank = setup.axis_rank("tp")
        given = {"replicate": WHOLE, "partial": WHOLE * TIMES[rank], "shard": TOKENS[rank]}[src.kind]
        tensor = given.clone().requires_grad_()
        edge = Edge("x", src, dst, 2, 4, is_shared)
        found = cross(tensor, edge, setup.mesh["tp"].get_group(), length)
        # The gradient of an element is a hundred times its value, and twice that on the second rank if it is shared.
        (found * (found.detach() * 100 * (TIMES[rank] if is_shared else 1))).sum().backward()
        return found.detach(), tensor.grad


def crossed(src, dst, is_shared=False, length=None):
    return run_ranks(crossed_on_ranks, 2, src, dst, is_shared, length)


@pytest.mark.parametrize(
    ("src", "dst", "is_shared", "found", "gradient"),
    [
        (REPLICATE, REPLICATE, True, (WHOLE, WHOLE), (WHOLE * 300, WHOLE * 300)),
        (PARTIAL, REPLICATE, False, (WHOLE * 3, WHOLE * 3), (WHOLE * 300, WHOLE * 300)),
        (PARTIAL, shard(1), False, tuple(3 * one for one in TOKENS), (WHOLE * 300, WHOLE * 300)),
        (REPLICATE, shard(1), False, TOKENS, (WHOLE * 100, WHOLE * 100)),
        (shard(1), REPLICATE, False, (WHOLE, WHOLE), tuple(100 * one for one in TOKENS)),
        (shard(1), REPLICATE, True, (WHOLE, WHOLE), tuple(300 * one for one in TOKENS)),
        (shard(1), shard(2), False, FEATURES, tuple(100 * one for one in TOKENS)),
    ],
)
def test_values_and_gradients_of_tokens_that_do_not_divide(src, dst, is_shared, found, gradient):
    """Three tokens on two ranks: the fourth place is a zero that nobody sees afterwards."""
    length = 3 if src == shard(1) else None
    for rank, (value, back) in enumerate(crossed(src, dst, is_shared, length)):
        assert torch.equal(value, found[rank])
        assert torch.equal(back, gradient[rank])
