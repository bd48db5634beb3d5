"""Rows between two ranks with two experts each, followed by hand."""

from __future__ import annotations

from typing import Any

import torch

from hp_core.config.models import AcceleratorConfig
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.expert.exchange import exchange, in_order_of_tokens, routes_of, rows_of_pairs
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
