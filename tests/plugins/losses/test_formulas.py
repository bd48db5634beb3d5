"""Dense and chunked losses against a plain implementation, in float64: the value and every gradient."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hp_core.testing.models import GEMMA2, LLAMA
from hp_plugins.losses.causal_lm import CausalLMLoss
from hp_plugins.losses.chunked_causal_lm import ChunkedCausalLMLoss
from hp_plugins.losses.logits import LogitTransform, probe_outputs
from hp_plugins.losses.objective import Objective
from tests.plugins.losses.plain import Options, TinyLM, a_batch, assert_same, gradients, run_loss, token_by_token

CHOICES: dict[str, tuple[Any, Any]] = {
    "bias": (False, True),
    "tied": (False, True),
    "softcap": (None, 1.5),
    "scale": (1.0, 0.3),
    "z_loss": (0.0, 0.1),
    "label_smoothing": (0.0, 0.2),
    "ignore_index": (-100, 3),
    "token_weights": (None, "weights"),
}
ALL = [Options(**dict(zip(CHOICES, values, strict=True))) for values in itertools.product(*CHOICES.values())]
LOSSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "dense": (CausalLMLoss, {}),
    "chunks of 1": (ChunkedCausalLMLoss, {"chunk_size": 1}),
    "chunks of 7": (ChunkedCausalLMLoss, {"chunk_size": 7}),
    "one chunk": (ChunkedCausalLMLoss, {"chunk_size": 64}),
}


@pytest.mark.parametrize("vocab", [97, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("softcap", CHOICES["softcap"])
def test_every_combination_of_options_is_the_formula(vocab: int, softcap: float | None) -> None:
    model_inputs, loss_inputs = a_batch(vocab)
    for options in ALL:
        if options.softcap != softcap:
            continue
        model = TinyLM(options, vocab)
        outputs = model.head(model.hidden(model_inputs["input_ids"]))
        wanted = token_by_token(outputs, loss_inputs["labels"], loss_inputs["weights"], options)
        wanted.backward()
        wanted_gradients = gradients(model)
        for name, (component, arguments) in LOSSES.items():
            loss_fn = component(**options.of_loss(), **arguments)
            loss_fn.bind_model(model, None)
            loss = run_loss(loss_fn, model, model_inputs, loss_inputs)
            loss.backward()
            assert loss.dtype == torch.float64
            assert loss.item() == pytest.approx(wanted.item(), rel=1e-12), (name, options)
            assert_same(gradients(model), wanted_gradients, 1e-12, (name, options))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("option", [name for name in CHOICES if name != "tied"])
def test_each_option_changes_the_loss_alone_and_beside_all_others(option: str, name: str) -> None:
    component, arguments = LOSSES[name]

    def value(options: Options) -> float:
        model = TinyLM(options, 97)
        loss_fn = component(**options.of_loss(), **arguments)
        loss_fn.bind_model(model, None)
        return run_loss(loss_fn, model, *a_batch(97)).item()

    off, on = CHOICES[option]
    for base in (ALL[0], ALL[-1]):
        one, other = (value(replace(base, **{option: choice})) for choice in (off, on))
        assert abs(one - other) > 1e-6 * abs(one)


# What each family does to its head's output, written out.

SIZES = {**LLAMA, "vocab_size": 97}
FAMILIES: dict[str, tuple[dict[str, Any], Options]] = {
    "llama": (SIZES, Options()),
    "cohere": ({**SIZES, "model_type": "cohere", "logit_scale": 0.3}, Options(scale=0.3)),
    "granite": ({**SIZES, "model_type": "granite", "logits_scaling": 3.0}, Options(scale=1 / 3)),
    # The same key as Granite's, and it multiplies.
    "hyperclovax": ({**SIZES, "model_type": "hyperclovax", "logits_scaling": 3.0}, Options(scale=3.0)),
    "gemma2": ({**GEMMA2, "vocab_size": 97, "final_logit_softcapping": 0.2}, Options(softcap=0.2)),
    "nanochat": ({**SIZES, "model_type": "nanochat", "final_logit_softcapping": 0.2}, Options(softcap=0.2)),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arguments", [{}, {"z_loss": 0.1, "label_smoothing": 0.2, "token_weights": "weights"}])
def test_models_of_transformers_give_the_formula(family: str, arguments: dict[str, Any]) -> None:
    config, of_model = FAMILIES[family]
    options = replace(of_model, **arguments)
    values = dict(config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values)).double().eval()
    model_inputs, loss_inputs = a_batch(97)
    hidden = model.model(input_ids=model_inputs["input_ids"], use_cache=False).last_hidden_state
    outputs = hidden @ model.lm_head.weight.T
    wanted = token_by_token(outputs, loss_inputs["labels"], loss_inputs["weights"], options)
    wanted.backward()
    wanted_gradients = gradients(model)
    for name, (component, chunks) in LOSSES.items():
        loss_fn = component(**options.of_loss(), **chunks)
        loss_fn.bind_model(model, None)
        loss = run_loss(loss_fn, model, model_inputs, loss_inputs)
        loss.backward()
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-12), name
        assert_same(gradients(model), wanted_gradients, 1e-12, name)


# By hand.


def both_ways(objective: Objective, logits: list[float], target: int, transform: LogitTransform) -> list[float]:
    """The loss of one token, by automatic differentiation's half and by the chunked one."""
    outputs = torch.tensor([logits], dtype=torch.float64)
    targets = torch.tensor([target])
    in_place = outputs.clone()
    transform.apply_(in_place, torch.empty_like(in_place))
    values = [objective.total(transform(outputs), targets), objective.total_and_gradient_(in_place, targets)]
    return [value.item() for value in values]


def test_a_soft_cap_divides_before_it_multiplies() -> None:
    cap = LogitTransform(softcap=30.0)
    outputs = torch.tensor([[124.0]], dtype=torch.float64)
    assert cap(outputs).item() == pytest.approx(29.985, abs=1e-3)
    slope = torch.empty_like(outputs)
    cap.apply_(outputs, slope)
    assert outputs.item() == pytest.approx(29.985, abs=1e-3)
    assert slope.item() == pytest.approx(1 - (29.98463 / 30) ** 2, abs=1e-5)


def test_capped_logits_by_hand() -> None:
    # tanh(1, -2, 3) = (0.761594, -0.964028, 0.995055); the log-normaliser is 1.654019.
    for value in both_ways(Objective(), [1.0, -2.0, 3.0], 2, LogitTransform(softcap=1.0)):
        assert value == pytest.approx(0.6590, abs=1e-4)


def test_label_smoothing_by_hand() -> None:
    # p = (1/2, 1/4, 1/4): NLL log 2, sum of -log p is log 2 + 2 log 4 = 5 log 2.
    logits = torch.tensor([2.0, 1.0, 1.0]).log().tolist()
    for value in both_ways(Objective(label_smoothing=0.3), logits, 0, LogitTransform()):
        assert value == pytest.approx((0.7 + 0.1 * 5) * 0.6931471806, rel=1e-6)


def test_the_z_loss_by_hand() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0]).log().tolist()
    for value in both_ways(Objective(z_loss=0.5), logits, 0, LogitTransform()):
        assert value == pytest.approx(0.6931471806 + 0.5 * 1.3862943611**2, rel=1e-6)


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.0625), LogitTransform(3.0, 7.0)])
def test_a_transform_is_measured_from_what_it_gives(transform: LogitTransform) -> None:
    outputs = probe_outputs(1, 4, 33, device=torch.device("cpu"))
    found = LogitTransform.measured(outputs, transform(outputs))
    assert found is not None
    assert found.scale == pytest.approx(transform.scale, rel=1e-12)
    assert found.softcap == (None if transform.softcap is None else pytest.approx(transform.softcap, rel=1e-12))


def test_other_transforms_are_told_apart() -> None:
    outputs = probe_outputs(1, 4, 33, device=torch.device("cpu"))
    for logits in (
        outputs + 1,
        outputs.clamp(-30, 30),
        outputs * 0,
        outputs[..., :-1],
        outputs.roll(1),
        outputs.relu(),
    ):
        assert LogitTransform.measured(outputs, logits) is None
