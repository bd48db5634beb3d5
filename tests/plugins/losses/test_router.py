"""Router losses: values by hand and by transformers, which routers they work on, which forward passes they count."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.output_capturing import OutputRecorder

from hp_core.errors import InputError, RunError
from hp_core.testing.models import tiny_batch, tiny_config, tiny_model
from hp_plugins.losses.router import RouterLosses, configured_balance
from hp_plugins.losses.router_probe import find_routers, score_function

LN3 = math.log(3)
# What a router sees of a token are its logits.
LOGITS = torch.tensor([[LN3, 0.0], [0.0, LN3], [math.nan, math.nan]])
A, B, PADDING = 0, 1, 2


class Gate(nn.Module):
    """Scores by `score`, which maps (tokens, experts) to the same."""

    def __init__(
        self, score: Callable[[torch.Tensor], torch.Tensor], num_chosen: int = 1, num_experts: int = 2
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(num_experts, 2))
        self.score, self.num_chosen = score, num_chosen

    def forward(self, hidden: torch.Tensor) -> Any:
        logits = F.linear(hidden.flatten(0, -2), self.weight)
        scores, experts = self.score(logits).topk(self.num_chosen, -1)
        return logits, scores, experts


class Model(PreTrainedModel):
    """Gates one after the other, all of which see the same."""

    config_class = PreTrainedConfig
    _can_record_outputs: ClassVar = {"router_logits": OutputRecorder(Gate, index=0)}

    def __init__(self, *gates: nn.Module) -> None:
        super().__init__(PreTrainedConfig())
        self.gates = nn.ModuleList(gates)
        self.calls = 1

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Any:
        del use_cache
        # The text of the probe has as many different tokens.
        table = LOGITS if input_ids.max() < len(LOGITS) else torch.linspace(-1, 2, 16).sin().view(8, 2)
        hidden = table[input_ids]
        for _ in range(self.calls):
            for gate in self.gates:
                gate(hidden)
        return SimpleNamespace()


def softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1)


def scaled_sigmoid(logits: torch.Tensor) -> torch.Tensor:
    return 2.5 * logits.sigmoid()


def terms_of(losses: RouterLosses, model: nn.Module, ids: list[list[int]], **inputs: Any) -> dict[str, torch.Tensor]:
    """The terms of a step of one micro-batch."""
    tokens = torch.tensor(ids)
    real = tokens != PADDING
    losses.arm()
    model(input_ids=tokens, **inputs)
    return losses.terms(real, int(real.sum()), losses.statistics(real))


def bound(model: nn.Module, balance: float | None = None, z: float = 0.0) -> RouterLosses:
    losses = RouterLosses(balance, z)
    losses.bind(model)
    return losses


# Values.


@pytest.mark.parametrize(
    ("score", "balance"),
    [
        # f = (3/4, 1/4), P = ((3 * 3/4 + 1/4) / 4, 3/8)
        (softmax, 2 * (0.75 * 0.625 + 0.25 * 0.375)),
        # Sigmoids of 1/2 and 3/4, normalised: p = (0.6, 0.4) for A.
        (scaled_sigmoid, 2 * (0.75 * 0.55 + 0.25 * 0.45)),
    ],
)
@pytest.mark.parametrize("num_layers", [1, 3])
def test_values_by_hand(score: Callable[[torch.Tensor], torch.Tensor], balance: float, num_layers: int) -> None:
    model = Model(*(Gate(score) for _ in range(num_layers)))
    losses = bound(model, balance=0.1, z=0.01)
    found = terms_of(losses, model, [[A, A, PADDING], [A, B, PADDING]])
    assert found["router_balance_loss"].item() == pytest.approx(0.1 * balance, rel=1e-6)
    # exp(logits) are 3 and 1 for both tokens.
    assert found["router_z_loss"].item() == pytest.approx(0.01 * math.log(4) ** 2, rel=1e-6)


def test_shares_of_two_calls_add_up() -> None:
    model = Model(Gate(softmax))
    losses = bound(model, balance=1.0, z=1.0)
    parts = [[[A, A]], [[A, PADDING, B]]]
    statistics: dict[str, torch.Tensor] = {}
    for ids in parts:
        losses.arm()
        model(input_ids=torch.tensor(ids))
        for name, value in losses.statistics(torch.tensor(ids) != PADDING).items():
            statistics[name] = statistics.get(name, 0) + value
    total = {"router_balance_loss": 0.0, "router_z_loss": 0.0}
    for ids in parts:
        losses.arm()
        model(input_ids=torch.tensor(ids))
        for name, value in losses.terms(torch.tensor(ids) != PADDING, 4, statistics).items():
            total[name] += value.item()
    assert total == pytest.approx({"router_balance_loss": 1.125, "router_z_loss": math.log(4) ** 2}, rel=1e-6)


@pytest.mark.parametrize("step", [0, 5])
def test_only_padding_is_zero(step: int) -> None:
    """Also in a step without a single real token, and whatever the router makes of the padding."""
    model = Model(Gate(softmax))
    losses = bound(model, balance=1.0, z=1.0)
    losses.arm()
    model(input_ids=torch.tensor([[PADDING, PADDING]]))
    found = losses.terms(torch.zeros(1, 2, dtype=torch.bool), step, {"router_load": torch.tensor([step, 0.0])})
    assert [value.item() for value in found.values()] == [0, 0]
    assert all(value.requires_grad for value in found.values())


OTHERS = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


def real_model(family: str, **config: Any) -> PreTrainedModel:
    """A tiny model of transformers with routers that are not indifferent."""
    values = {"model_type": family, **OTHERS, "num_local_experts": 4}
    if family in ("qwen3_moe", "deepseek_v3", "qwen3_vl_moe"):
        values = tiny_config(family)
    elif family != "mixtral":
        values |= {"num_experts": 4}
    text = values.get("text_config", values)
    text |= config
    auto = AutoModelForImageTextToText if "text_config" in values else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.for_model(**values), experts_implementation="eager")
    for router in find_routers(model):
        nn.init.normal_(next(router.module.parameters()), std=0.5)
    return model


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen3_vl_moe", "qwen2_moe", "gpt_oss"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_whole_batch_has_the_value_of_transformers(family: str, padded: bool) -> None:
    model = real_model(family, output_router_logits=True, router_aux_loss_coef=0.02)
    assert configured_balance(model) == 0.02
    losses = bound(model)
    batch = tiny_batch(family if family == "qwen3_vl_moe" else "qwen3_moe")
    del batch["labels"]
    real = torch.ones_like(batch["input_ids"], dtype=torch.bool)
    if padded:
        real[:3, 7:] = False
    losses.arm()
    output = model(**batch, attention_mask=real.long(), use_cache=False)
    found = losses.terms(real, int(real.sum()), losses.statistics(real))
    assert list(found) == ["router_balance_loss"]
    assert output.aux_loss.item() > 0
    torch.testing.assert_close(found["router_balance_loss"], 0.02 * output.aux_loss, rtol=2e-6, atol=0)
    ours = torch.autograd.grad(
        found["router_balance_loss"], list(model.parameters()), allow_unused=True, retain_graph=True
    )
    theirs = torch.autograd.grad(0.02 * output.aux_loss, list(model.parameters()), allow_unused=True)
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-8)


def test_the_gradient_of_the_routers_doubles_with_the_weight() -> None:
    model = real_model("qwen3_moe")
    gates = [router.module.weight for router in find_routers(model)]
    found = []
    for weight in (0.5, 1.0):
        losses = bound(model, balance=weight, z=weight)
        terms = terms_of(losses, model, [[3, 4, 5, 6]], use_cache=False)
        found.append([torch.autograd.grad(term, gates, retain_graph=True) for term in terms.values()])
    for single, double in zip(*found, strict=True):
        for one, two in zip(single, double, strict=True):
            assert one.abs().max() > 1e-4
            torch.testing.assert_close(2 * one, two)


# What is computed at all.


def test_the_weight_is_the_configs_only_where_transformers_would_train_on_it() -> None:
    assert configured_balance(real_model("mixtral", router_aux_loss_coef=0.5)) == 0
    assert configured_balance(real_model("mixtral", router_aux_loss_coef=0.5, output_router_logits=True)) == 0.5
    assert configured_balance(real_model("qwen3_vl_moe", router_aux_loss_coef=0.5, output_router_logits=True)) == 0.5
    # transformers computes no such loss for DeepSeek-V3, whose config knows no weight.
    assert configured_balance(real_model("deepseek_v3", output_router_logits=True)) == 0
    assert configured_balance(nn.Linear(1, 1)) == 0


@pytest.mark.parametrize(("balance", "z"), [(0.0, 0.0), (None, 0.0)])
def test_without_weights_nothing_is_listened_to(balance: float | None, z: float) -> None:
    model = real_model("mixtral")
    losses = bound(model, balance, z)
    assert not any(module._forward_hooks for module in model.modules())
    assert not losses.needs_statistics
    assert terms_of(losses, model, [[3, 4]], use_cache=False) == {}
    assert losses.statistics(torch.ones(1, 2, dtype=torch.bool)) == {}


def test_the_z_loss_alone_needs_no_statistics() -> None:
    model = real_model("mixtral")
    losses = bound(model, balance=0.0, z=0.1)
    assert not losses.needs_statistics
    assert list(terms_of(losses, model, [[3, 4]], use_cache=False)) == ["router_z_loss"]
    assert bound(model, balance=0.1).needs_statistics


def test_binding_to_another_model_leaves_the_first_alone() -> None:
    first, second = Model(Gate(softmax)), Model(Gate(softmax))
    losses = bound(first, balance=1.0)
    losses.bind(second)
    assert not first.gates[0]._forward_hooks
    assert len(second.gates[0]._forward_hooks) == 1


# Which routers.


@pytest.mark.parametrize(
    ("family", "scores", "num_layers"),
    [
        ("qwen3_moe", "softmax", 2),
        ("mixtral", "softmax", 2),
        ("qwen3_vl_moe", "softmax", 2),
        ("gpt_oss", "softmax", 2),
        ("deepseek_v3", "sigmoid", 1),
        ("glm4_moe", "sigmoid", 1),
        # Its routers start with zeros.
        ("afmoe", "sigmoid", 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_function_of_each_family(family: str, scores: str, num_layers: int, dtype: torch.dtype) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(**(tiny_config(family) if family in TINY else {"model_type": family, **OTHERS}))
        auto = AutoModelForImageTextToText if family == "qwen3_vl_moe" else AutoModelForCausalLM
        model = auto.from_config(config, experts_implementation="eager").to(dtype)
    routers = find_routers(model)
    assert len(routers) == num_layers
    weight = next(one for one in routers[0].module.parameters() if one.ndim == 2)
    assert score_function(model, routers) == (scores, len(weight))


TINY = ("qwen3_moe", "deepseek_v3", "qwen3_vl_moe")


def test_the_probe_leaves_the_model_and_the_random_numbers_alone() -> None:
    model = tiny_model("qwen3_moe")
    nn.init.zeros_(find_routers(model)[0].module.weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.get_rng_state()
    score_function(model, find_routers(model))
    assert model.training
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def refusal(model: nn.Module, balance: float = 0.1) -> str:
    with pytest.raises(InputError) as caught:
        bound(model, balance)
    assert str(caught.value).startswith("loss_fn: ")
    assert str(caught.value).endswith("; set loss_fn.router_balance=0 and leave router_z_loss out")
    return str(caught.value)


def test_a_dense_model_is_refused() -> None:
    assert "LlamaForCausalLM has no routers" in refusal(tiny_model("llama"))
    with pytest.raises(InputError, match="has no routers"):
        bound(tiny_model("llama"), balance=0.0, z=0.1)
    bound(tiny_model("llama"))


class NoIndices(Gate):
    def forward(self, hidden: torch.Tensor) -> Any:
        return super().forward(hidden)[:2]


class OtherNumbers(Gate):
    def forward(self, hidden: torch.Tensor) -> Any:
        logits, scores, experts = super().forward(hidden)
        return logits, scores, experts + 1


class Dead(Gate):
    def forward(self, hidden: torch.Tensor) -> Any:
        return super().forward(hidden * 0)


@pytest.mark.parametrize(
    ("gates", "told"),
    [
        ([NoIndices(softmax)], r"gates.0 \(NoIndices\) does not give logits, the chosen experts and their scores"),
        ([OtherNumbers(softmax)], r"gates.0 \(OtherNumbers\) numbers its experts otherwise than 0 to 1"),
        ([Gate(lambda logits: logits.square())], "scores the experts neither by a softmax nor by a sigmoid"),
        ([Gate(lambda logits: softmax(softmax(logits)))], "neither by a softmax nor by a sigmoid"),
        # Of one expert's score divided by itself nothing can be seen.
        ([Gate(torch.ones_like)], "neither by a softmax nor by a sigmoid"),
        ([Dead(softmax, num_chosen=2)], "gives scores that do not tell a softmax from a sigmoid"),
        ([Gate(softmax), Gate(scaled_sigmoid)], "gates.1 .* or scores them otherwise, than gates.0"),
        ([Gate(softmax), Gate(softmax, num_experts=3)], "gates.1 .* has other experts"),
    ],
)
def test_a_router_that_is_not_understood_is_refused(gates: list[Gate], told: str) -> None:
    with pytest.raises(InputError, match=told):
        bound(Model(*gates), balance=0.1)


def test_llama4_is_refused_by_the_name_of_its_router() -> None:
    assert "Llama4Router" in refusal(real_model("llama4_text"))


# Which forward passes.


def test_what_the_engine_must_not_do_is_told() -> None:
    model = Model(Gate(softmax))
    losses = bound(model, balance=1.0)
    real = torch.ones(1, 3, dtype=torch.bool)
    ids = torch.tensor([[A, B, A]])
    with pytest.raises(RunError, match="prepare_model_inputs was not called"):
        losses.terms(real, 3, {})
    losses.arm()
    with pytest.raises(RunError, match=r"router gates\.0 was called 0 times in a forward pass"):
        losses.statistics(real)
    model(input_ids=ids)
    with pytest.raises(RunError, match=r"router gates\.0 saw 3 tokens of a micro-batch of 6"):
        losses.statistics(real.repeat(2, 1))
    model.calls = 2
    losses.arm()
    model(input_ids=ids)
    with pytest.raises(RunError, match="was called 2 times in a forward pass, not once"):
        losses.statistics(real)


def test_calls_after_the_terms_are_not_recorded() -> None:
    model = Model(Gate(softmax))
    losses = bound(model, balance=1.0, z=1.0)
    first = terms_of(losses, model, [[A, A, A, B]])
    model(input_ids=torch.tensor([[B, B]]))
    second = terms_of(losses, model, [[A, A, A, B]])
    assert {name: value.item() for name, value in first.items()} == {
        name: value.item() for name, value in second.items()
    }


def checkpoint_layers(model: PreTrainedModel, *, reentrant: bool) -> None:
    with warnings.catch_warnings():
        # Later versions of transformers have another name for it.
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def test_reentrant_checkpointing_is_refused() -> None:
    """The routers' logits have no gradient there, so the loss would not be trained."""
    model = real_model("qwen3_moe")
    losses = bound(model, balance=1.0)
    model.train()
    ids = [[3, 4, 5, 6]]
    checkpoint_layers(model, reentrant=True)
    with pytest.raises(RunError, match="without gradients, as reentrant checkpointing does; set use_reentrant=False"):
        terms_of(losses, model, ids, use_cache=False)
    checkpoint_layers(model, reentrant=False)
    assert terms_of(losses, model, ids, use_cache=False)["router_balance_loss"].requires_grad
