"""The Qwen3-MoE family: its two factories, and its recipe as its header says to run it."""

from __future__ import annotations

import re
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_core import ArgumentError
from hp_core.config import load_recipe
from hp_core.observe.trackers import read_metrics
from hp_core.testing.ranks import run_ranks
from hp_plugins.models.qwen3_moe.adapter.attention import attention
from hp_plugins.models.qwen3_moe.adapter.replacements import WithGroupedExperts, feed_forward
from hp_plugins.replacements.fused_qkv import FusedQKVAttention
from hp_plugins.replacements.grouped_experts import GroupedExperts
from hp_plugins.replacements.rms_norm import FusedRMSNorm
from hp_plugins.replacements.sdpa_attention import SdpaAttention
from hp_plugins.replacements.swiglu import LeanSwiGLU
from tests.e2e.runs import WITH_COMPONENTS, hp_train_here, manifest, steps, train_here
from tests.plugins.replacing import IDS, PACKED, assert_near, assert_same, generated, model_of, swapped

# In the installed package, which need not lie in this checkout.
RECIPE = Path(str(files("hp_plugins.models.qwen3_moe.recipes") / "train.yaml"))


def header_command() -> list[str]:
    """The arguments of the command in the recipe's header that runs it here."""
    line = next(line for line in RECIPE.read_text().splitlines() if "--model.pretrained=null" in line)
    program, recipe, *overrides = shlex.split(line.removeprefix("#"))
    assert program == "hp-train"
    assert RECIPE.as_posix().endswith(recipe)
    return [str(RECIPE), *overrides]


@pytest.mark.parametrize("fused", [False, True], ids=["sdpa", "fused"])
def test_attention_with_its_norms(fused: bool) -> None:
    plain = model_of("qwen3_moe")
    model = swapped(plain, attention, "*.self_attn", fused_qkv=fused)
    for layer in model.model.layers:
        assert isinstance(layer.self_attn, FusedQKVAttention if fused else SdpaAttention)
        assert isinstance(layer.self_attn.q_norm, FusedRMSNorm)
        assert isinstance(layer.self_attn.k_norm, FusedRMSNorm)
    assert_same(plain, model)
    assert_same(plain, model, position_ids=PACKED)
    assert torch.equal(generated(model), generated(plain))
    if not fused:
        assert list(model.state_dict()) == list(plain.state_dict())


def test_attention_of_another_family_is_refused() -> None:
    with pytest.raises(ArgumentError, match="Qwen3Attention is no Qwen3MoeAttention") as caught:
        swapped(model_of("qwen3"), attention, "*.self_attn")
    assert caught.value.hint == "use sdpa_attention or fused_qkv"


def test_one_rule_serves_dense_and_sparse_layers() -> None:
    plain = model_of("qwen3_moe", mlp_only_layers=[0])
    model = swapped(plain, feed_forward, "*.mlp")
    dense, sparse = (layer.mlp for layer in model.model.layers)
    assert isinstance(dense, LeanSwiGLU)
    assert isinstance(sparse, WithGroupedExperts)
    assert isinstance(sparse.experts, GroupedExperts)
    assert sparse.gate is model.get_submodule("model.layers.1.mlp.gate")
    assert list(model.state_dict()) == list(plain.state_dict())
    assert_same(plain, model)
    with pytest.raises(ArgumentError, match="Qwen3MoeAttention is no SwiGLU feed-forward"):
        swapped(plain, feed_forward, "*.self_attn")


def test_the_router_is_still_recorded_and_balanced() -> None:
    plain = model_of("qwen3_moe")
    model = swapped(swapped(plain, feed_forward, "*.mlp"), attention, "*.self_attn", fused_qkv=True)
    wanted, found = (one(IDS, output_router_logits=True) for one in (plain, model))
    assert len(found.router_logits) == 2
    assert_near(found.aux_loss, wanted.aux_loss)
    found.aux_loss.backward()
    wanted.aux_loss.backward()
    for name in ("model.layers.0.mlp.gate.weight", "model.embed_tokens.weight"):
        assert_near(model.get_parameter(name).grad, plain.get_parameter(name).grad)


def test_the_recipe_is_valid_as_it_stands() -> None:
    config = load_recipe(RECIPE).config
    assert config.model.arguments["pretrained"] == "Qwen/Qwen3-30B-A3B"
    assert [one.when for one in config.plan_overrides] == ["dp", None, None]
    assert (config.mixed_precision.param_dtype, config.mixed_precision.reduce_dtype) == ("bfloat16", "float32")


def test_the_recipe_runs_as_its_header_says(tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished = hp_train_here(*header_command(), f"--output_dir={run}")
    assert finished.returncode == 0, finished.stderr
    losses = steps(read_metrics(run))
    assert len(losses) == 20
    assert losses[0] == pytest.approx(5.57, abs=0.1)
    assert losses[-1] < 4
    said = finished.stdout + finished.stderr
    assert "plan_overrides[0]: rms_norm left out: when: dp" in said
    assert re.search(
        r"attention replaced 2 modules \(Qwen3MoeAttention -> FusedQKVAttention\[Qwen3MoeAttention\]\)", said
    )
    assert "LeanSwiGLU[Qwen3MoeMLP]" in said
    assert "WithGroupedExperts[Qwen3MoeSparseMoeBlock]" in said
    assert (run / "checkpoints" / "step_00000020").is_dir()


def test_the_recipe_gives_the_plain_model_s_losses_on_one_rank_and_on_two(tmp_path: Path) -> None:
    path, *overrides = header_command()
    # In fp32, so that only the order of sums is left to differ, and few steps.
    changed = {
        "mixed_precision": "{param_dtype: null, reduce_dtype: null}",
        "training.train_iters": "4",
        "lr_scheduler.warmup_steps": "0",
        "evaluation.at_end": "false",
        "checkpoint": "{save_every: 0, save_last: false}",
    }
    kept = [one for one in overrides if one.removeprefix("--").partition("=")[0] not in changed]
    overrides = [*kept, *(f"--{name}={value}" for name, value in changed.items())]
    losses: dict[str, list[Any]] = {}
    for name, more in (("plain", ["--plan_overrides=[]"]), ("one", [])):
        assert hp_train_here(path, *overrides, *more, f"--output_dir={tmp_path / name}").returncode == 0
    run_ranks(train_here, 2, path, [*overrides, f"--output_dir={tmp_path / 'two'}"], preload=WITH_COMPONENTS)
    for name in ("plain", "one", "two"):
        losses[name] = steps(read_metrics(tmp_path / name))
    assert losses["one"] == pytest.approx(losses["plain"], abs=2e-6)
    assert losses["two"] == pytest.approx(losses["plain"], abs=2e-5)
    norms, *others = (rule["modules"] for rule in manifest(tmp_path / "two")["replaced_modules"])
    assert [*map(len, others)] == [2, 2]
    assert sorted(norms) == sorted(
        ["model.norm", *(f"model.layers.{i}.{name}_layernorm" for i in (0, 1) for name in ("input", "post_attention"))]
    )
