"""Rows between ranks and their experts, followed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hp_core.config.models import AcceleratorConfig
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.expert.exchange import exchange, in_order_of_tokens, routes_of, rows_of_pairs
from hp_core.parallel.expert.experts import spread_experts
from hp_core.testing.ranks import run_ranks
from hp_core.testing.setups import tiny_setup

# The experts that the tokens of each rank have chosen, two each. Nobody has chosen expert 1.
CHOSEN = ([[0, 3], [3, 2]], [[3, 2]])


def travelled(environment: ProcessEnvironment) -> dict[str, Any]:
    with tiny_setup(environment, accelerator=AcceleratorConfig(ep_size=2)) as setup:
        assert setup.expert_mesh is not None
        group = setup.expert_mesh["ep"].get_group()
        chosen = torch.tensor(CHOSEN[setup.rank])
        tokens = (10.0 * setup.rank + torch.arange(1.0, 1 + len(chosen)))[:, None].requires_grad_()
        routes = routes_of(chosen, 4, group)
        here = exchange(rows_of_pairs(tokens, routes, 2), routes.send, routes.receive, group)
        back = in_order_of_tokens(exchange(here * 2, routes.receive, routes.send, group), routes)
        # The gradient of a pair is its place among the rank's pairs, from 1.
        (back * torch.arange(1.0, 1 + len(back))[:, None]).sum().backward()
        assert tokens.grad is not None
        return {
            "send": routes.send,
            "receive": routes.receive,
            "experts": routes.experts.tolist(),
            "here": here.flatten().tolist(),
            "back": back.flatten().tolist(),
            "gradient": tokens.grad.flatten().tolist(),
        }


def test_rows_by_hand() -> None:
    first, second = run_ranks(travelled, 2)
    # Rank 0 sends its token 1 to its own expert 0; 2 to expert 2, and 1 and 2 to expert 3, both of rank 1.
    assert first == {
        "send": [1, 3],
        "receive": [1, 0],
        "experts": [0],
        "here": [1.0],
        "back": [2.0, 2.0, 4.0, 4.0],
        "gradient": [2.0 * (1 + 2), 2.0 * (3 + 4)],
    }
    assert second == {
        "send": [0, 2],
        "receive": [3, 2],
        "experts": [0, 1, 1, 0, 1],
        "here": [2.0, 1.0, 2.0, 11.0, 11.0],
        "back": [22.0, 22.0],
        "gradient": [2.0 * (1 + 2)],
    }


class Scaling(nn.Module):
    """Four experts: the one of number n multiplies with n + 1. Counts the rows that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.factor = nn.Parameter(torch.arange(1.0, 5).view(4, 1, 1))
        self.rows = 0

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        self.rows += len(hidden_states)
        scaled = hidden_states[:, None] * self.factor[top_k_index, 0]
        return (scaled * top_k_weights[..., None]).sum(1)


def on_tensor_ranks(
    environment: ProcessEnvironment, sizes: dict[str, int], num_tokens: list[int]
) -> dict[str, list[Any] | int]:
    """What a rank gets of tokens 1, 2, … for experts 0 and 3, with weights 1 and 10; `num_tokens` by data rank."""
    with tiny_setup(environment, accelerator=AcceleratorConfig(**sizes)) as setup:
        (experts,) = spread_experts(nn.Sequential(Scaling()), setup)
        tokens = torch.arange(1.0, 1 + num_tokens[setup.dp_rank])[:, None].requires_grad_()
        weights = torch.tensor([1.0, 10.0]).repeat(len(tokens), 1).requires_grad_()
        output = experts(tokens, torch.tensor([0, 3]).repeat(len(tokens), 1), weights)
        output.sum().backward()
        factor = experts.get_parameter("factor").grad
        return {
            "output": output.flatten().tolist(),
            "tokens": tokens.grad.flatten().tolist(),
            "weights": weights.grad.tolist(),
            "experts": factor.to_local().flatten().tolist(),
            "rows": experts.rows,
        }


def test_tensor_ranks_send_parts_of_their_tokens_by_hand() -> None:
    """Three tokens: the first rank sends two of them, the second one, and each computes the rows of its own experts."""
    first, second = run_ranks(on_tensor_ranks, 2, {"tp_size": 2, "ep_size": 2}, [3])
    same = {"output": [41.0, 82.0, 123.0], "tokens": [41.0] * 3, "weights": [[1.0, 4.0], [2.0, 8.0], [3.0, 12.0]]}
    assert first == {**same, "experts": [6.0, 0.0], "rows": 3}
    assert second == {**same, "experts": [0.0, 60.0], "rows": 3}


@pytest.mark.parametrize(("ep_size", "rows"), [(4, [3, 1, 1, 3]), (2, [3, 3, 1, 1])])
def test_ranks_without_tokens_take_part_by_hand(ep_size: int, rows: list[int]) -> None:
    """The first two ranks have three tokens, the others none. An expert without a row computes one that is nobody's."""
    found = run_ranks(on_tensor_ranks, 4, {"tp_size": 2, "ep_size": ep_size}, [3, 0])
    assert [one["output"] for one in found] == [[41.0, 82.0, 123.0]] * 2 + [[]] * 2
    assert [one["tokens"] for one in found] == [[41.0] * 3] * 2 + [[]] * 2
    assert [one["rows"] for one in found] == rows
    # Whoever holds the same experts adds up what they have.
    gradients = torch.tensor([one["experts"] for one in found]).view(-1, 4).sum(0)
    assert gradients.tolist() == [6.0, 0.0, 0.0, 60.0]
