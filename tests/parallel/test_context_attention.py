"""Attention over shared sequences, each way against a plain softmax over the whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hp_core.config import load_recipe
from hp_core.config.models import AcceleratorConfig
from hp_core.errors import InputError
from hp_core.parallel.context import ring
from hp_core.parallel.context.attention import METHODS
from hp_core.parallel.context.sequence import SLICE, SequenceSlice, cut, sight, slices_of
from hp_core.parallel.context.tiles import Tile, tiles_of
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.sizes import check_sizes
from hp_core.testing.models import tiny_config
from hp_core.testing.ranks import run_ranks
from hp_core.testing.setups import tiny_setup
from tests.e2e.runs import recipe
from tests.model.tiny import build

LENGTH = 16
# Two rows: one of three documents, one of a single document.
POSITIONS = torch.stack([torch.cat([torch.arange(7), torch.arange(1), torch.arange(8)]), torch.arange(16)])


class Attention(nn.Module):
    """As much of a model's attention as the functions look at."""

    num_key_value_groups = 2


def tensors(key_features: int = 3, value_features: int = 5) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the output, of four heads of which two share a key."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(4, key_features), (2, key_features), (2, value_features)]
    inputs = [torch.randn(2, heads, LENGTH, size, generator=generator) for heads, size in shapes]
    return [*inputs, torch.randn(2, LENGTH, 4, value_features, generator=generator)]


def plainly(inputs: list[torch.Tensor], window: int | None, kept: torch.Tensor | float = 1.0) -> list[torch.Tensor]:
    """The output and the gradients of query, key and value, by a softmax in float64."""
    query, key, value, outer = (one.double() for one in inputs)
    learnt = [one.requires_grad_() for one in (query, key, value)]
    documents = torch.cumsum(POSITIONS == 0, dim=1)
    mask = sight(torch.arange(LENGTH), documents, torch.arange(LENGTH), documents, window)
    scores = query @ key.repeat_interleave(2, 1).mT / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1) * kept
    output = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)
    return [output.detach(), *torch.autograd.grad(output, learnt, outer)]


def shared(
    environment: ProcessEnvironment, method: str, layout: str, window: int | None, tile_size: int, dropout: float = 0.0
) -> list[torch.Tensor]:
    """The same of a rank's own tokens, its positions last."""
    accelerator = AcceleratorConfig(cp_size=environment.world_size, cp_method=method, cp_layout=layout)
    with tiny_setup(environment, accelerator=accelerator) as setup:
        torch.manual_seed(environment.rank)
        part = a_slice(setup, layout == "head_tail", tile_size)
        query, key, value, outer = tensors(value_features=LENGTH if dropout else 5)
        if dropout:
            # What is seen of each key is its weight.
            value = torch.eye(LENGTH).expand(2, 2, -1, -1)
        own = [one[:, :, part.positions].clone().requires_grad_() for one in (query, key, value)]
        options: dict[str, Any] = {SLICE: part, "sliding_window": window, "dropout": dropout, "scaling": 3**-0.5}
        output, _ = METHODS[method](Attention(), *own, None, **options)
        gradients = torch.autograd.grad(output, own, outer[:, part.positions])
        return [output.detach(), *gradients, part.positions]


def a_slice(setup: Any, balanced: bool, tile_size: int) -> SequenceSlice:
    group, rank = setup.cp_mesh.get_group(), setup.axis_rank("cp")
    inputs, labels = {"position_ids": POSITIONS}, {"labels": torch.zeros(2, LENGTH)}
    part = cut(inputs, labels, rank=rank, group=group, balanced=balanced)[0][SLICE]
    documents = torch.cumsum(POSITIONS == 0, dim=1)
    parts = slices_of(LENGTH, group.size(), balanced=balanced)
    return replace(part, tiles=tuple(tiles_of(one, documents[:, one], tile_size) for one in parts))


def joined(found: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The ranks' tokens in the order of the sequence."""
    order = torch.cat([one[-1] for one in found]).argsort()
    output, *gradients = (torch.cat([one[index] for one in found], dim=1 if index == 0 else 2) for index in range(4))
    return [output[:, order], *(one[:, :, order] for one in gradients)]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    ("ranks", "layout"), [(2, "head_tail"), (2, "contiguous"), pytest.param(4, "head_tail", marks=pytest.mark.layouts)]
)
@pytest.mark.parametrize(("method", "tile_size"), [*((method, 1024) for method in METHODS), ("ring", 3)])
def test_output_and_gradients_are_those_of_a_plain_softmax(
    method: str, ranks: int, layout: str, window: int | None, tile_size: int
) -> None:
    found = joined(run_ranks(shared, ranks, method, layout, window, tile_size))
    for one, wanted in zip(found, plainly(tensors(), window), strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one.double(), wanted, rtol=1e-5, atol=2e-6)


def test_the_ring_drops_the_same_weights_in_both_passes() -> None:
    found = joined(run_ranks(shared, 2, "ring", "head_tail", None, 4, 0.5))
    inputs = tensors(value_features=LENGTH)
    inputs[2] = torch.eye(LENGTH).expand(2, 2, -1, -1).clone()
    whole = plainly(inputs, None)[0]
    factors = torch.where(whole > 0, found[0] / whole, 0).round(decimals=3)
    assert set(factors.unique().tolist()) == {0.0, 2.0}
    seen = whole > 0
    assert 0.4 < float((factors[seen] == 0).double().mean()) < 0.6
    # Neither two heads nor two ranks drop alike.
    assert not torch.equal(factors[:, :, 0], factors[:, :, 1])
    for one, wanted in zip(found, plainly(inputs, None, factors.transpose(1, 2)), strict=True):
        torch.testing.assert_close(one.double(), wanted, rtol=1e-5, atol=2e-6)


def what_is_held(environment: ProcessEnvironment) -> tuple[list[int], int, int]:
    """Tokens of each tensor that the ring keeps for the backward pass and of those it passes on; pairs computed."""
    kept: list[int] = []
    passed: list[int] = []
    computed: list[int] = []
    pairs, passing = ring._Ring.pairs, ring._Passing.__init__

    def counted(self: Any, source: int) -> Any:
        found = list(pairs(self, source))
        computed.append(len(found))
        return iter(found)

    def noted(self: Any, tensor: torch.Tensor, group: Any) -> None:
        passed.append(tensor.shape[2])
        passing(self, tensor, group)

    ring._Ring.pairs, ring._Passing.__init__ = counted, noted  # the process ends with the test
    with tiny_setup(environment, accelerator=AcceleratorConfig(cp_size=4, cp_method="ring")) as setup:
        part = a_slice(setup, True, 2)
        own = [one[:, :, part.positions].requires_grad_() for one in tensors()[:3]]

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor.shape[3] if tensor.shape[1:3] == (2, 2) else tensor.shape[2])
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output, _ = METHODS["ring"](Attention(), *own, None, **{SLICE: part})
        forward = sum(computed)
        output.sum().backward()
    return sorted({*kept, *passed}), forward, sum(computed) - forward


def test_no_rank_holds_more_than_a_part_and_all_have_the_same_work() -> None:
    """Of 64 pairs of two tokens by two, a causal mask leaves 36, and the second row is one document."""
    for held, forward, backward in run_ranks(what_is_held, 4):
        assert held == [4]
        assert forward == backward == 9


def tile(first: int, last: int, *documents: tuple[int, int]) -> Tile:
    return Tile(slice(0, last - first + 1), first, last, documents or ((1, 1),))


def test_what_tiles_see_by_hand() -> None:
    assert tile(4, 7).sees(tile(0, 3)) == "all"
    assert tile(0, 3).sees(tile(4, 7)) == "none"
    assert tile(4, 7).sees(tile(4, 7)) == "some"
    assert tile(4, 4).sees(tile(4, 4)) == "all"
    assert tile(4, 7).sees(tile(0, 3), 8) == "all"
    assert tile(4, 7).sees(tile(0, 3), 7) == "some"
    assert tile(4, 7).sees(tile(0, 3), 2) == "some"
    assert tile(4, 7).sees(tile(0, 3), 1) == "none"
    assert tile(4, 7, (2, 2)).sees(tile(0, 3, (1, 1))) == "none"
    assert tile(4, 7, (1, 2)).sees(tile(0, 3, (1, 1))) == "some"
    assert tile(4, 7, (2, 2), (1, 1)).sees(tile(0, 3, (1, 1), (1, 1))) == "some"


def test_tiles_are_runs_of_neighbours() -> None:
    documents = torch.tensor([[1, 1, 2, 4, 4]])
    tiles = tiles_of(torch.tensor([0, 1, 2, 7, 8]), documents, 2)
    assert [(one.tokens, one.first, one.last, one.documents) for one in tiles] == [
        (slice(0, 2), 0, 1, ((1, 1),)),
        (slice(2, 3), 2, 2, ((2, 2),)),
        (slice(3, 5), 7, 8, ((4, 4),)),
    ]


HEADS = "--model.config={model_type: llama, num_attention_heads: 6, num_key_value_heads: 2}"


@pytest.mark.parametrize(
    ("ranks", "accelerator", "message", "works"),
    [
        (4, "{cp_size: 4, cp_method: ulysses}", "6 attention heads can't be exchanged among 4 ranks", "1, 2, 3, 6"),
        (
            4,
            "{cp_size: 2, tp_size: 2, cp_method: ulysses}",
            "3 attention heads on each of 2 tensor ranks can't be exchanged among 2 ranks",
            "1, 3",
        ),
    ],
)
def test_heads_that_can_not_be_traded_are_refused_before_a_process_starts(
    tmp_path: Path, ranks: int, accelerator: str, message: str, works: str
) -> None:
    config = load_recipe(str(recipe(tmp_path)), [HEADS, f"--accelerator={accelerator}"]).config
    with pytest.raises(InputError) as caught:
        check_sizes(config, ranks)
    (problem,) = caught.value.problems
    assert (problem.path, problem.message) == ("accelerator.cp_size", message)
    assert problem.hint == f"cp_size that would: {works}; or write accelerator.cp_method: ring or all_gather"


@pytest.mark.parametrize(("key", "value"), [("cp_method", "ring"), ("cp_layout", "contiguous")])
def test_a_key_that_would_do_nothing_is_refused(tmp_path: Path, key: str, value: str) -> None:
    path = str(recipe(tmp_path))
    with pytest.raises(InputError) as caught:
        load_recipe(path, [f"--accelerator.{key}={value}"])
    (problem,) = caught.value.problems
    assert problem.path == f"accelerator.{key}"
    assert problem.message == f"{value!r} has no effect with cp_size 1"
    assert problem.hint == f"write cp_size, or remove '{key}'"
    load_recipe(path, [f"--accelerator.{key}={value}", "--accelerator.cp_size=2"])


def refusal(environment: ProcessEnvironment, config: dict[str, Any]) -> str:
    with tiny_setup(environment, accelerator=AcceleratorConfig(cp_size=2, cp_method="ulysses")) as setup:
        try:
            build(setup, config)
        except InputError as error:
            return str(error.problems[0].message)
    raise AssertionError("nothing was refused")


def test_heads_that_can_not_be_traded_are_refused_by_the_model() -> None:
    config = {**tiny_config("llama"), "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1}
    assert run_ranks(refusal, 2, config) == ["3 attention heads can't be exchanged among 2 ranks"] * 2


@pytest.mark.parametrize("method", METHODS)
def test_scores_that_are_not_known_are_refused(method: str) -> None:
    part = cut({"position_ids": POSITIONS}, {"labels": torch.zeros(2, LENGTH)}, rank=0, group=Two(), balanced=True)
    with pytest.raises(
        InputError, match=r"accelerator\.cp_size: Attention: context parallelism knows no cap on scores"
    ):
        METHODS[method](Attention(), *tensors()[:3], None, **{SLICE: part[0][SLICE], "softcap": 30.0})


class Two:
    """A group of two ranks."""

    def size(self) -> int:
        return 2
