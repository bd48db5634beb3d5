"""Adapters on every layout, against one process: losses, the gradients of adapters, and of no other weight."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.equivalence.layouts import Case, Found, Layout, assert_same, found_on

pytest.importorskip("peft")

TP2 = {"tp_size": 2}
LAYOUTS = {
    "two micro-batches": Layout(1, num_micro_batches=2),
    "run again": Layout(1, checkpointing="full"),
    "fsdp2": Layout(2),
    "fsdp2, run again": Layout(2, checkpointing="selective", num_micro_batches=2),
    "fsdp2, swapped and compiled": Layout(2, checkpointing="full", swapping=True, backend="aot_eager"),
    "tp2": Layout(2, TP2),
    "tp2, run again": Layout(2, TP2, checkpointing="full"),
    "tp4": Layout(4, {"tp_size": 4}),
    "tp2, sequence parallel": Layout(2, {**TP2, "sequence_parallel": True}),
    "tp2, loss parallel": Layout(2, {**TP2, "sequence_parallel": True, "loss_parallel": True}),
    "fsdp2 x tp2": Layout(4, TP2),
    "cp2": Layout(2, {"cp_size": 2}),
    "pp2": Layout(2, {"pp_size": 2}, num_micro_batches=2),
    "pp2 x fsdp2": Layout(4, {"pp_size": 2}, num_micro_batches=2),
    "pp2, zero bubble": Layout(2, {"pp_size": 2, "pp_schedule": "zbv_zero_bubble"}, num_micro_batches=4),
}
# Both matrices are drawn, so that each has a gradient.
LORA = {"method": "lora", "r": 4, "lora_alpha": 8, "init_lora_weights": False}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {**LORA, "use_rslora": True},
    "dora": {**LORA, "use_dora": True},
}


def case(kind: str, **more: Any) -> Case:
    return Case("llama", config={"num_hidden_layers": 4}, peft={**KINDS[kind], **more})


@cache
def alone(kind: str) -> Found:
    return found_on(case(kind), Layout())


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_one_process(kind: str, name: str) -> None:
    assert_same(found_on(case(kind), LAYOUTS[name]), alone(kind))
    assert all("lora_" in one for one in alone(kind).gradients)


WITHOUT_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
OTHERS: dict[str, tuple[Case, Layout]] = {
    "experts": (Case("qwen3_moe", peft=LORA), Layout(2, {"ep_size": 2})),
    "experts, tensors": (Case("qwen3_moe", peft={**LORA, "use_dora": True}), Layout(4, {"ep_size": 2, "tp_size": 2})),
    "latent attention": (Case("deepseek_v3", peft={**LORA, "use_dora": True}), Layout(2, TP2)),
    "transposed weights": (Case("gpt2", config=WITHOUT_DROPOUT, peft={**LORA, "use_dora": True}), Layout(2)),
    "biases": (Case("llama", config={"attention_bias": True, "mlp_bias": True}, peft=KINDS["dora"]), Layout(2, TP2)),
    "embeddings": (Case("llama", peft={**LORA, "target_modules": ["embed_tokens", "lm_head", "q_proj"]}), Layout(2)),
    "embeddings, tensors": (
        Case("llama", peft={**KINDS["dora"], "target_modules": ["embed_tokens", "lm_head", "o_proj"]}),
        Layout(4, TP2),
    ),
    "trained whole": (
        Case("llama", peft={**LORA, "modules_to_save": ["lm_head", "embed_tokens", "norm", "1.mlp.up_proj"]}),
        Layout(2),
    ),
    "trained whole, tensors": (
        Case("llama", peft={**LORA, "modules_to_save": ["lm_head", "embed_tokens", "model.norm", "layers.1.mlp"]}),
        Layout(4, TP2),
    ),
    "trained whole, sequences": (
        Case("llama", peft={**LORA, "modules_to_save": ["lm_head", "model.norm", "layers.1.input_layernorm"]}),
        Layout(2, {**TP2, "sequence_parallel": True}),
    ),
    "a norm of stages": (
        Case("llama", peft={**LORA, "modules_to_save": ["model.norm"]}),
        Layout(2, {"pp_size": 2}, num_micro_batches=2),
    ),
    "float32 on bfloat16": (Case("llama", peft=KINDS["dora"], dtype="bfloat16"), Layout(2)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_and_modules_are_the_same_too(name: str) -> None:
    one, layout = OTHERS[name]
    found = found_on(one, layout)
    assert any("modules_to_save" in name for name in found.gradients) == ("modules_to_save" in one.peft)
    if one.dtype == "bfloat16":
        assert_same(found, found_on(one, Layout()), loss=1e-2, absolute=1e-3, relative=5e-2)
    else:
        assert_same(found, found_on(one, Layout()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", ["off", "full"])
def test_tensor_ranks_drop_the_same_of_what_they_have_whole(kind: str, checkpointing: str) -> None:
    """As one process does, whose random numbers they draw: of the inputs that projections into a region have."""
    one = case(kind, lora_dropout=0.3, target_modules=["*.[qkv]_proj", "up_proj", "gate_proj"])
    layout = Layout(2, {**TP2, "sequence_parallel": True}, checkpointing=checkpointing)
    assert_same(found_on(one, layout), found_on(one, Layout()), absolute=1e-5)
    assert found_on(one, Layout()).loss != found_on(case(kind), Layout()).loss


@pytest.mark.parametrize("schedule", ["1f1b", "zbv_zero_bubble"])
@pytest.mark.parametrize("layer", [0, 3])
def test_stages_without_adapters_pass_gradients_on(layer: int, schedule: str) -> None:
    one = case("lora", target_modules=[f"model.layers.{layer}.*_proj"])
    layout = Layout(2, {"pp_size": 2, "pp_schedule": schedule}, num_micro_batches=4)
    assert_same(found_on(one, layout), found_on(one, Layout()))
