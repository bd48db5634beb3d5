"""Sizes of the data axes, checked before any process starts."""

from __future__ import annotations

import pytest

from hp_core.config.models import FsdpConfig
from hp_core.config.target import Target
from hp_core.errors import InputError
from hp_core.parallel.known import known_config
from hp_core.parallel.plan.shapes import sizes_in_config
from hp_core.parallel.sizes import data_sizes


@pytest.mark.parametrize(
    ("replicate", "shard", "world_size", "sizes"),
    [(1, None, 1, (1, 1)), (1, None, 8, (1, 8)), (2, None, 8, (2, 4)), (8, None, 8, (8, 1)), (2, 3, 6, (2, 3))],
)
def test_sizes(replicate, shard, world_size, sizes):
    assert data_sizes(FsdpConfig(dp_replicate_size=replicate, dp_shard_size=shard), world_size) == sizes


@pytest.mark.parametrize(
    ("replicate", "shard", "world_size", "message", "works"),
    [
        (3, None, 4, "dp_replicate_size 3 does not make 4 ranks", "1 x 4, 2 x 2, 4 x 1"),
        (2, None, 1, "dp_replicate_size 2 does not make 1 ranks", "1 x 1"),
        (1, 2, 6, "dp_replicate_size 1 x dp_shard_size 2 does not make 6 ranks", "1 x 6, 2 x 3, 3 x 2, 6 x 1"),
        (2, 4, 4, "dp_replicate_size 2 x dp_shard_size 4 does not make 4 ranks", "1 x 4, 2 x 2, 4 x 1"),
    ],
)
def test_sizes_that_do_not_make_the_world_come_with_those_that_do(replicate, shard, world_size, message, works):
    with pytest.raises(InputError) as caught:
        data_sizes(FsdpConfig(dp_replicate_size=replicate, dp_shard_size=shard), world_size)
    (problem,) = caught.value.problems
    assert problem.path == "fsdp_config"
    assert problem.message == message
    assert problem.hint == f"replicate x shard that would: {works}"


def problems_of(tmp_path, **model):
    """What is wrong with three tensor ranks, with the model of a directory and what the recipe writes on top."""
    (tmp_path / "config.json").write_text('{"num_attention_heads": 8, "num_key_value_heads": 3}')
    target = Target("model", "hp.models", name="causal_lm", arguments=model)
    return [problem.message for problem in sizes_in_config(known_config(target)).problems(3)]


def test_what_tensor_ranks_share_is_read_off_the_recipe_and_the_model_s_directory(tmp_path):
    shared = "8 attention heads can't be shared by 3 ranks"
    assert problems_of(tmp_path, pretrained=str(tmp_path)) == [shared]
    assert problems_of(tmp_path, pretrained=str(tmp_path), config={"num_attention_heads": 9}) == []
    assert problems_of(tmp_path, config={"num_attention_heads": 8}) == [
        shared,
        "8 key and value heads can't be shared by 3 ranks",
    ]
    assert problems_of(tmp_path, pretrained="some/model") == []
    assert problems_of(tmp_path) == []


@pytest.mark.parametrize("text", ["no json", "[1]"])
def test_a_configuration_that_can_not_be_read_is_left_to_building(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    target = Target("model", "hp.models", name="causal_lm", arguments={"pretrained": str(tmp_path)})
    assert known_config(target) == {}
