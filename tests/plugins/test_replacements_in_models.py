"""The first-party replacements through the engine: loaded, sharded, exported and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hp_core.config.compile import CompileConfig
from hp_core.errors import InputError
from hp_core.model.compile import start_compiling
from hp_core.model.export import export_model
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.testing.models import COMMON
from hp_core.testing.ranks import run_ranks
from hp_core.training.compiling import Compilations
from tests.model.replacement.rules import IDS, apply, checkpoint, logits, replacing, rule, skeleton
from tests.model.tiny import DEEPSEEK_V3, GPT2, LLAMA, QWEN3_MOE, build, whole

SPARSE_AND_DENSE = {**QWEN3_MOE, "mlp_only_layers": [0]}
QWEN2 = {"model_type": "qwen2", **COMMON}
BLOCK_NORMS = ("*.input_layernorm", "*.post_attention_layernorm", "model.norm")
FAMILY = "hp_plugins.models.qwen3_moe.adapter"

# Configuration, and (pattern, component, arguments) of each rule.
RULES: dict[str, tuple[dict[str, Any], list[tuple[Any, str, dict[str, Any]]]]] = {
    "plain": (
        QWEN3_MOE,
        [(BLOCK_NORMS, "rms_norm", {}), ("*.self_attn", "sdpa_attention", {}), ("*.experts", "grouped_experts", {})],
    ),
    "fused": (LLAMA, [("*norm", "rms_norm", {}), ("*.self_attn", "fused_qkv", {}), ("*.mlp", "swiglu", {})]),
    "biased": (QWEN2, [("*.self_attn", "fused_qkv", {})]),
    "latent": (
        DEEPSEEK_V3,
        [("*norm", "rms_norm", {}), ("*.experts", "grouped_experts", {}), ("*.shared_experts", "swiglu", {})],
    ),
    "family": (
        SPARSE_AND_DENSE,
        [
            (BLOCK_NORMS, "rms_norm", {}),
            ("*.self_attn", f"{FAMILY}.attention.attention", {"fused_qkv": True}),
            ("*.mlp", f"{FAMILY}.replacements.feed_forward", {}),
        ],
    ),
}


def rules_of(case: str) -> tuple[dict[str, Any], list[Any]]:
    config, entries = RULES[case]
    rules = []
    for index, (match, name, arguments) in enumerate(entries):
        path = name if "." in name else f"hp_plugins.replacements.{name}.{name}"
        rules.append(rule(match, path, index=index, module_type="torch.nn.Module", **arguments))
    return config, rules


@pytest.mark.parametrize("case", RULES)
def test_a_checkpoint_loads_and_exports_as_in_the_plain_model(case: str, tmp_path: Path) -> None:
    plain = checkpoint(RULES[case][0], tmp_path / "hf")
    _, rules = rules_of(case)
    with replacing(*rules) as setup:
        model = build(setup, pretrained=str(tmp_path / "hf"))
    assert all(one["modules"] for one in setup.replacer.summaries)
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-6)
    export_model(model, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32")
    assert torch.equal(logits(again), logits(plain))
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())


@pytest.mark.parametrize("case", ["plain", "latent"])
def test_keys_shapes_types_and_gradients_wanted_are_those_of_the_plain_model(case: str) -> None:
    config, rules = rules_of(case)
    plain, model = skeleton(config), skeleton(config)
    apply(model, *rules)
    facts = [
        {name: (one.shape, one.dtype, one.requires_grad) for name, one in each.named_parameters()}
        for each in (plain, model)
    ]
    assert facts[0] == facts[1]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in plain.named_buffers()]


# As in tests/model/test_compile.py.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", RULES)
def test_compiled_it_computes_the_same(case: str) -> None:
    config, rules = rules_of(case)
    asked = CompileConfig(mode="default", backend="aot_eager")
    torch._dynamo.reset()
    with replacing(*rules) as setup:
        plain = build(setup, config)
    with replacing(*rules) as setup:
        model = build(setup, config, compile_config=asked)
    compiler = start_compiling(model)
    assert compiler is not None
    compilations = Compilations(compiler)
    wanted, found = (_gradients(one) for one in (plain, model))
    compilations.read()
    facts = compilations.facts()
    assert (facts["modules"], facts["failures"]) == (len(model.model.layers), {})
    # torch compiles grouped products of bf16 alone.
    broken = [place for place in facts["graph_breaks"] if "grouped products" not in place]
    assert (broken, bool(facts["graph_breaks"])) == ([], "grouped_experts" in str(RULES[case]) or case == "family")
    assert facts["graph_breaks"] or facts["graphs"] == 1
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).abs().max()) <= 1e-5 * float(gradient.abs().max()), name


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    model(input_ids=IDS, use_cache=False).logits.square().mean().backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def _sharded(environment: ProcessEnvironment, case: str, hf: str, out: str) -> dict[str, Any]:
    _, rules = rules_of(case)
    with replacing(*rules, environment=environment) as setup:
        model = build(setup, pretrained=hf)
        output = model(input_ids=IDS, use_cache=False).logits
        # The gradients are summed over the ranks.
        (output.square().mean() / setup.world_size).backward()
        grads = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        export_model(model, Path(out))
        return {"logits": output.detach(), "grads": grads}


@pytest.mark.parametrize("case", ["fused", "family"])
def test_two_ranks_give_the_numbers_of_one_and_export_the_original_layout(case: str, tmp_path: Path) -> None:
    plain = checkpoint(RULES[case][0], tmp_path / "hf")
    one, two = (
        run_ranks(_sharded, ranks, case, str(tmp_path / "hf"), str(tmp_path / f"out{ranks}")) for ranks in (1, 2)
    )
    for found in (*one, *two):
        torch.testing.assert_close(found["logits"], logits(plain), rtol=0, atol=2e-6)
        for name, grad in one[0]["grads"].items():
            torch.testing.assert_close(found["grads"][name], grad, rtol=0, atol=1e-6, msg=name)
    for ranks in (1, 2):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / f"out{ranks}", dtype="float32")
        assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())


@pytest.mark.parametrize(
    ("config", "match", "component", "message"),
    [
        (GPT2, "*ln_1", "rms_norm", r"transformer.h.0.ln_1 \(and 1 more\): LayerNorm is no RMSNorm"),
        (DEEPSEEK_V3, "*.self_attn", "sdpa_attention", r"model.layers.0.self_attn \(and 1 more\): DeepseekV3Attention"),
        (DEEPSEEK_V3, "*.mlp", "swiglu", r"model.layers.1.mlp: DeepseekV3MoE is no SwiGLU feed-forward"),
        (LLAMA, "*.self_attn", "grouped_experts", r"LlamaAttention holds no experts in two fused parameters"),
    ],
)
def test_a_module_of_another_kind_is_refused_by_name_and_the_model_stays(
    config: dict[str, Any], match: str, component: str, message: str
) -> None:
    model = skeleton(config)
    before = dict(model.named_modules())
    path = f"hp_plugins.replacements.{component}.{component}"
    with pytest.raises(InputError, match=message):
        apply(model, rule(match, path, module_type="torch.nn.Module"))
    assert all(model.get_submodule(name) is module for name, module in before.items())
