"""Chunked equals dense on models of transformers, alone and on shards, with and without gradient checkpointing."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from hp_core.parallel.fsdp import shard_model
from hp_core.parallel.setup import DistributedSetup
from hp_core.testing.checks import RankResults, Section, on_ranks, whole
from hp_core.testing.models import auto_class, take_rows, tiny_batch, tiny_config
from hp_core.testing.setups import tiny_setup
from hp_core.training.loss import IGNORE_INDEX
from hp_plugins.losses.causal_lm import CausalLMLoss
from hp_plugins.losses.chunked_causal_lm import ChunkedCausalLMLoss
from hp_plugins.losses.head import LossHead, measure_transform
from hp_plugins.losses.logits import LogitTransform
from tests.plugins.losses.plain import assert_same, run_loss

FAMILIES = ("qwen3", "llama", "qwen3_moe", "deepseek_v3", "gemma2", "qwen3_vl")
DENSE, CHUNKED = "dense", "chunked"
# Whether activations are checkpointed, and the rows without a target: 2 and 3 are the second rank's.
STEPS: dict[str, tuple[bool, tuple[int, ...]]] = {"plain": (False, ()), "checkpointed, a silent rank": (True, (2, 3))}

Result = tuple[float, dict[str, torch.Tensor]]


def a_model(family: str, checkpointing: bool) -> nn.Module:
    """In training mode, in fp32; Gemma's soft cap is one that its small logits feel."""
    values = tiny_config(family)
    if family == "gemma2":
        values["final_logit_softcapping"] = 0.1
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    model: Any = auto_class(config.model_type).from_config(config, experts_implementation="eager")
    model.train()
    if checkpointing:
        with warnings.catch_warnings():
            # The new name came after the oldest version that we support.
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable()
            assert model.is_gradient_checkpointing
    return model  # type: ignore[no-any-return]  # transformers is untyped here


def a_loss(name: str) -> nn.Module:
    return CausalLMLoss() if name == DENSE else ChunkedCausalLMLoss(chunk_size=5)


def a_step(model: nn.Module, name: str, batch: Mapping[str, torch.Tensor], total: int) -> Result:
    loss_fn = a_loss(name)
    loss_fn.bind_model(model, None)
    inputs = {one: value for one, value in batch.items() if one != "labels"}
    loss = run_loss(loss_fn, model, {**inputs, "use_cache": False}, {"labels": batch["labels"]}) / total
    loss.backward()
    found = {one: whole(value.grad) for one, value in model.named_parameters() if value.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.item(), found


def a_batch(family: str, silent: tuple[int, ...]) -> tuple[dict[str, torch.Tensor], int]:
    batch = tiny_batch(family)
    batch["labels"][list(silent)] = IGNORE_INDEX
    return batch, int((batch["labels"] != IGNORE_INDEX).sum())


def on_a_shard(setup: DistributedSetup, case: None) -> dict[tuple[str, str, str], Result]:
    """Every step of every family, with both losses on one model."""
    found = {}
    for family in FAMILIES:
        for step, (checkpointing, silent) in STEPS.items():
            model = a_model(family, checkpointing)
            shard_model(model, setup)
            batch, total = a_batch(family, silent)
            own = take_rows(batch, 2 * setup.rank, 2 * setup.rank + 2)
            for name in (DENSE, CHUNKED):
                loss, gradients = a_step(model, name, own, total)
                loss = sum(row[0] for row in setup.gather_on_host([loss]))
                found[family, step, name] = loss, gradients
    return found


@pytest.fixture(scope="module")
def shards() -> RankResults:
    return on_ranks([Section("shards", on_a_shard)], None)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_equals_dense_alone_and_on_two_shards(shards: RankResults, family: str, step: str) -> None:
    checkpointing, silent = STEPS[step]
    model, (batch, total) = a_model(family, checkpointing), a_batch(family, silent)
    alone = {name: a_step(model, name, batch, total) for name in (DENSE, CHUNKED)}
    wanted_loss, wanted = alone[DENSE]
    for rank in [{(family, step, name): one for name, one in alone.items()}, *shards.of("shards")]:
        for name in alone:
            loss, gradients = rank[family, step, name]
            assert loss == pytest.approx(wanted_loss, abs=1e-6)
            assert_same(gradients, wanted, 1e-6, (family, step, name))


def test_mixed_precision_computes_the_head_s_loss_in_fp32() -> None:
    """Parameters in bf16 for the computation, master weights and gradients in fp32."""
    from hp_core.config.models import MixedPrecisionConfig

    found = {}
    with tiny_setup(precision=MixedPrecisionConfig(param_dtype="bfloat16")) as setup:
        for name in (DENSE, CHUNKED):
            model = a_model("llama", False)
            shard_model(model, setup)
            found[name] = a_step(model, name, *a_batch("llama", ()))
    assert found[CHUNKED][0] == pytest.approx(found[DENSE][0], rel=1e-3)
    assert {one.dtype for one in found[CHUNKED][1].values()} == {torch.float32}
    assert_same(found[CHUNKED][1], found[DENSE][1], 2e-2, "bf16")


def test_gemma_caps_its_logits_without_being_told() -> None:
    values = tiny_config("gemma2")
    assert "final_logit_softcapping" not in values
    model = auto_class("gemma2").from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    assert measure_transform(model, LossHead.of(model)) == LogitTransform(1.0, pytest.approx(30.0, rel=1e-6))
