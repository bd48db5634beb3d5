"""Router losses through the engine: terms and gradients of a step are those of its real tokens, however it is cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hp_core.config.memory import ActivationCheckpointConfig
from hp_core.errors import RunError
from hp_core.model.activation_checkpoint import checkpoint_activations
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.fsdp import shard_model
from hp_core.parallel.setup import DistributedSetup
from hp_core.testing.checks import require_close
from hp_core.testing.loss_steps import engine_step, micro_batches
from hp_core.testing.models import FAMILIES, QWEN3_MOE, take_rows, tiny_batch, tiny_model
from hp_core.testing.ranks import run_ranks
from hp_core.testing.setups import tiny_setup
from hp_core.training.evaluation import evaluating
from hp_core.training.loss import IGNORE_INDEX, contract_of
from hp_plugins.losses.router import RouterLosses
from hp_plugins.losses.router_probe import find_routers
from hp_plugins.replacements.grouped_experts import grouped_experts
from tests.plugins.replacing import swapped

Batch = dict[str, torch.Tensor]

BALANCE, Z = 0.3, 0.05
FOUR = ("qwen3_moe", "mixtral", "deepseek_v3", "qwen3_vl_moe")


class RoutedLoss(nn.Module):
    """Cross entropy and router losses, as a loss of a recipe holds them; remembers what it was asked."""

    reduction = "mean"

    def __init__(self, balance: float | None = BALANCE, z: float = Z) -> None:
        super().__init__()
        self.routers = RouterLosses(balance, z)
        self.shares: list[dict[str, float]] = []
        self.looked_ahead: list[torch.Tensor] = []
        self.trained_on: list[torch.Tensor] = []

    @property
    def needs_statistics(self) -> bool:
        return self.routers.needs_statistics

    def bind_model(self, model: nn.Module, distributed_setup: Any) -> None:
        self.routers.bind(model)

    def prepare_model_inputs(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> dict[str, Any]:
        if self.training:
            self.routers.arm()
        return {name: value for name, value in model_inputs.items() if name not in ("labels", "shift_labels")}

    def step_statistics(self, *, model_output: Any, real_tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.routers.statistics(real_tokens)
        self.looked_ahead += found.values()
        return found

    def step_terms(
        self,
        *,
        model_output: Any,
        real_tokens: torch.Tensor,
        num_real_tokens: int,
        statistics: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        self.trained_on += self.routers.statistics(real_tokens).values()
        found = self.routers.terms(real_tokens, num_real_tokens, statistics)
        self.shares.append({name: value.item() for name, value in found.items()})
        return found

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model_output.logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)


@dataclass(frozen=True)
class Cut:
    """How a step is made of the same real tokens: micro-batches on each rank, what is padded, how it is computed."""

    micro_batches: int = 1
    padding: str = "none"
    checkpointing: bool = False
    grouped_experts: bool = False


@dataclass(frozen=True)
class Found:
    """The step's terms and whole gradients."""

    terms: dict[str, float]
    gradients: dict[str, torch.Tensor]


def model_of(family: str, dtype: torch.dtype, **config: Any) -> PreTrainedModel:
    """A tiny model in training mode, whose routers prefer some experts."""
    if family in FAMILIES and not config:
        model = tiny_model(family, dtype=dtype)
    else:
        values = {**QWEN3_MOE, "num_local_experts": 4, "model_type": family, **config}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            built = AutoConfig.for_model(**values)
            model = AutoModelForCausalLM.from_config(built, experts_implementation="eager").to(dtype).train()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(0.1)  # what all tokens have in common, the routers prefer
        for router in find_routers(model):
            weight = router.module.weight
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return model


def batch_of(family: str, padding: str) -> Batch:
    """Four rows of 12 tokens, 12 more tokens of padding behind each, or four rows of padding behind all."""
    batch = tiny_batch(family if family in FAMILIES else "qwen3_moe")
    batch["is_padding"] = torch.zeros_like(batch["labels"], dtype=torch.bool)
    if padding == "tails":
        tails = {name: torch.full_like(batch[name], 7) for name in ("input_ids", "labels", "is_padding")}
        tails["labels"].fill_(IGNORE_INDEX)
        if "position_ids" in batch:
            tails["position_ids"] = batch["position_ids"] + batch["position_ids"].shape[1]
        else:
            tails["mm_token_type_ids"] = torch.zeros_like(batch["input_ids"])
        batch |= {name: torch.cat([batch[name], tail.to(batch[name].dtype)], 1) for name, tail in tails.items()}
    if padding == "rows":
        rows = {**batch, "labels": torch.full_like(batch["labels"], IGNORE_INDEX)}
        rows["is_padding"] = torch.ones_like(batch["is_padding"])
        batch = {name: torch.cat([batch[name], rows[name]]) for name in batch}
    return batch


def checkpoint_layers(model: PreTrainedModel) -> None:
    checkpoint_activations(model, ActivationCheckpointConfig(mode="full"))


def step(setup: DistributedSetup, family: str, dtype: torch.dtype, cut: Cut) -> Found:
    """This rank's part of the step, by the engine."""
    model = model_of(family, dtype)
    if cut.grouped_experts:
        model = swapped(model, grouped_experts, "*.experts")
    if cut.checkpointing:
        checkpoint_layers(model)
    shard_model(model, setup)
    loss_fn = RoutedLoss()
    loss_fn.bind_model(model, setup)
    batch = in_dtype(batch_of(family, cut.padding), dtype)
    rows = len(batch["input_ids"]) // setup.world_size
    own = take_rows(batch, setup.rank * rows, (setup.rank + 1) * rows)
    done = engine_step(model, loss_fn, micro_batches(own, cut.micro_batches, contract_of(loss_fn)), setup)
    sums = {name: sum(one[name] for one in loss_fn.shares) for name in sorted(loss_fn.shares[0])}
    by_rank = setup.gather_on_host(list(sums.values()))
    terms = dict(zip(sums, (sum(column) for column in zip(*by_rank, strict=True)), strict=True))
    return Found(terms, done.gradients)


def in_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


def whole_batch(family: str, dtype: torch.dtype) -> Found:
    """The same from the formulas, of one forward pass over the real tokens alone."""
    model = model_of(family, dtype)
    outputs: list[Any] = []
    for router in find_routers(model):
        router.module.register_forward_hook(lambda module, args, output: outputs.append(output))
    batch = in_dtype(batch_of(family, "none"), dtype)
    labels = batch.pop("labels")
    del batch["is_padding"]
    logits = model(**batch, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
    all_logits = torch.cat([one[0] for one in outputs]).to(dtype)
    chosen = F.one_hot(torch.cat([one[2] for one in outputs]), 4).sum(1).to(dtype)
    scores = all_logits.softmax(-1)
    if family == "deepseek_v3":
        scores = all_logits.sigmoid() / all_logits.sigmoid().sum(-1, keepdim=True)
    terms = {
        "router_balance_loss": BALANCE * 4 * (chosen.mean(0) * scores.mean(0)).sum(),
        "router_z_loss": Z * all_logits.exp().sum(-1).log().square().mean(),
    }
    (loss + torch.stack(list(terms.values())).sum()).backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return Found({name: value.item() for name, value in terms.items()}, gradients)


def require_same(found: Found, wanted: Found, tolerance: float, what: str) -> None:
    assert found.terms == pytest.approx(wanted.terms, rel=tolerance), what
    require_close(found.gradients, wanted.gradients, tolerance, f"{what}: the gradient", "")


def tolerance(family: str, dtype: torch.dtype, cut: Cut) -> float:
    # DeepSeek-V3's router and the activation of grouped experts compute in float32 whatever the model's dtype.
    in_float32 = dtype == torch.float32 or family == "deepseek_v3" or cut.grouped_experts
    return 2e-6 if in_float32 else 1e-12


ONE_RANK = [
    Cut(1),
    Cut(2),
    Cut(4),
    Cut(1, "tails"),
    Cut(4, "tails"),
    Cut(1, "rows"),
    Cut(2, "rows"),
    Cut(4, "rows"),
    Cut(1, checkpointing=True),
    Cut(4, "tails", checkpointing=True),
    Cut(2, "rows", grouped_experts=True),
]
TWO_RANKS = [Cut(1, "tails"), Cut(2), Cut(2, "rows"), Cut(2, "tails", checkpointing=True)]
CASES = [
    ("qwen3_moe", torch.float64),
    ("mixtral", torch.float64),
    ("deepseek_v3", torch.float32),
    ("qwen3_vl_moe", torch.float64),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", FOUR)
def test_any_cut_on_one_rank(family: str, dtype: torch.dtype) -> None:
    wanted = whole_batch(family, dtype)
    assert wanted.terms["router_balance_loss"] > 1.1 * BALANCE * 2  # of perfectly balanced experts, two for each token
    with tiny_setup() as setup:
        for cut in ONE_RANK:
            require_same(step(setup, family, dtype, cut), wanted, tolerance(family, dtype, cut), f"{cut}")


def on_rank(environment: ProcessEnvironment) -> list[list[Found]]:
    with tiny_setup(environment) as setup:
        return [[step(setup, family, dtype, cut) for cut in TWO_RANKS] for family, dtype in CASES]


def test_any_cut_on_two_ranks() -> None:
    """With rows of padding behind all others, the second rank has no real token."""
    wanted = [whole_batch(family, dtype) for family, dtype in CASES]
    for by_case in run_ranks(on_rank, 2):
        for (family, dtype), steps, whole in zip(CASES, by_case, wanted, strict=True):
            for cut, one in zip(TWO_RANKS, steps, strict=True):
                require_same(one, whole, tolerance(family, dtype, cut), f"{family} {cut} on two ranks")


# Passes and random numbers.


def dropout_step(balance: float | None, *, checkpointing: bool = False, seed: int = 1) -> tuple[RoutedLoss, Any]:
    """A step of four micro-batches with dropout, and the gradients."""
    with tiny_setup() as setup:
        model = model_of("qwen3_moe", torch.float32, attention_dropout=0.5)
        if checkpointing:
            checkpoint_layers(model)
        loss_fn = RoutedLoss(balance, z=0.0)
        loss_fn.bind_model(model, setup)
        parts = micro_batches(batch_of("qwen3_moe", "none"), 4, contract_of(loss_fn))
        torch.manual_seed(seed)
        return loss_fn, engine_step(model, loss_fn, parts, setup).gradients


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_pass_for_the_statistics_sees_the_routes_of_the_pass_with_gradients(checkpointing: bool) -> None:
    loss_fn, _ = dropout_step(BALANCE, checkpointing=checkpointing)
    assert len(loss_fn.looked_ahead) == 4
    # The main pass asks once more, of what it recorded itself.
    assert torch.equal(torch.stack(loss_fn.looked_ahead), torch.stack(loss_fn.trained_on))
    assert torch.stack(loss_fn.looked_ahead).sum(-1).tolist() == [2 * 2 * 12.0] * 4
    other, _ = dropout_step(BALANCE, seed=2)
    assert not torch.equal(torch.stack(loss_fn.looked_ahead), torch.stack(other.looked_ahead))


def test_the_pass_for_the_statistics_leaves_the_random_numbers_as_they_were() -> None:
    """Dropout of the step is that of a step without router losses, and so is what is drawn after it."""
    found = []
    for balance in (0.0, 1e-30):
        loss_fn, gradients = dropout_step(balance)
        assert len(loss_fn.looked_ahead) == (4 if balance else 0)
        found.append((gradients, torch.get_rng_state()))
    (plain, stream), (balanced, stream_after) = found
    assert torch.equal(stream, stream_after)
    for name, gradient in plain.items():
        torch.testing.assert_close(balanced[name], gradient, rtol=1e-6, atol=1e-8)


def test_evaluation_records_nothing() -> None:
    model = model_of("qwen3_moe", torch.float32)
    loss_fn = RoutedLoss()
    with tiny_setup() as setup:
        loss_fn.bind_model(model, setup)
        (one,) = micro_batches(batch_of("qwen3_moe", "none"), 1, contract_of(loss_fn))
        with evaluating(model, loss_fn):
            model(**loss_fn.prepare_model_inputs(one.model_inputs, one.loss_inputs))
    with pytest.raises(RunError, match="no router was heard"):
        loss_fn.step_statistics(model_output=None, real_tokens=one.real_tokens)
