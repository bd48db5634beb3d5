"""The losses over tokens train a mixture's routers: by the model's config, or by what the recipe says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_core.errors import InputError
from hp_core.parallel.tiny import tiny_setup
from hp_core.testing.loss_steps import engine_step, micro_batches
from hp_core.testing.models import tiny_batch, tiny_model
from hp_core.training.accounting import StepLoss
from hp_core.training.loss import IGNORE_INDEX, contract_of
from hp_plugins.losses.causal_lm import CausalLMLoss
from hp_plugins.losses.chunked_causal_lm import ChunkedCausalLMLoss
from hp_plugins.losses.focal import FocalLoss

LOSSES = [(CausalLMLoss, {}), (ChunkedCausalLMLoss, {"chunk_size": 5}), (FocalLoss, {"gamma": 0.0})]
BATCH = tiny_batch("qwen3_moe")


def a_model(coefficient: float | None = None) -> Any:
    model = tiny_model("qwen3_moe", dtype=torch.float64).eval()
    if coefficient is not None:
        model.config.output_router_logits = True
        model.config.router_aux_loss_coef = coefficient
    return model


def expected(coefficient: float, z: float = 0.0) -> float:
    """The mean cross entropy, and what transformers itself makes of the routers."""
    labels = BATCH["labels"]
    with torch.no_grad():
        inputs = {"input_ids": BATCH["input_ids"], "position_ids": BATCH["position_ids"], "use_cache": False}
        output = a_model()(**inputs, output_router_logits=True)
    loss = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
    squares = torch.stack([logits.double().logsumexp(-1).square().mean() for logits in output.router_logits]).mean()
    return float(loss + coefficient * output.aux_loss + z * squares)


def step(component: Any, arguments: dict[str, Any], model: Any, count: int = 2) -> Any:
    with tiny_setup() as setup:
        loss_fn = component(**arguments)
        loss_fn.bind_model(model, setup)
        return engine_step(model, loss_fn, micro_batches(BATCH, count, contract_of(loss_fn)), setup)


@pytest.mark.parametrize(("component", "arguments"), LOSSES)
def test_left_out_the_model_s_config_says_how_much_the_balance_counts(component, arguments):
    assert step(component, arguments, a_model()).loss == pytest.approx(expected(0), rel=1e-6)
    for coefficient in (0.0, 0.25):
        found = step(component, arguments, a_model(coefficient))
        assert found.loss == pytest.approx(expected(coefficient), rel=1e-6)


@pytest.mark.parametrize(("component", "arguments"), LOSSES)
def test_the_recipe_has_the_last_word(component, arguments):
    given = {**arguments, "router_balance": 0.5, "router_z_loss": 0.1}
    for count in (1, 2, 4):
        assert step(component, given, a_model(0.25), count).loss == pytest.approx(expected(0.5, 0.1), rel=1e-6)
    off = step(component, {**arguments, "router_balance": 0.0}, a_model(0.25))
    assert off.loss == pytest.approx(expected(0), rel=1e-6)


def gate_of(step: Any) -> torch.Tensor:
    return step.gradients["model.layers.0.mlp.gate.weight"]


@pytest.mark.parametrize(("component", "arguments"), LOSSES)
def test_the_routers_gradient_grows_with_the_coefficient(component, arguments):
    plain, once, twice = (
        gate_of(step(component, {**arguments, "router_balance": balance}, a_model())) for balance in (0.0, 0.1, 0.2)
    )
    assert (once - plain).abs().max() > 1e-4
    # transformers' routers compute their softmax in fp32.
    torch.testing.assert_close(twice - plain, 2 * (once - plain), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("component", "arguments"), LOSSES)
def test_a_dense_model_has_no_routers_to_train(component, arguments):
    loss_fn = component(**arguments, router_z_loss=0.1)
    with tiny_setup() as setup, pytest.raises(InputError, match="has no routers"):
        loss_fn.bind_model(tiny_model("llama"), setup)


def test_the_terms_are_logged_by_name(monkeypatch):
    seen = []
    weigh = StepLoss.weigh
    monkeypatch.setattr(StepLoss, "weigh", lambda self, *a: (seen.append(self), weigh(self, *a))[1])
    step(CausalLMLoss, {"router_balance": 0.5, "router_z_loss": 0.1}, a_model())
    assert set(seen[-1].logged) == {"loss", "router_balance_loss", "router_z_loss"}
    total = sum(float(part) for part in seen[-1].logged.values())
    assert total == pytest.approx(expected(0.5, 0.1), rel=1e-6)
