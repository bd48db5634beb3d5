"""What we ship keeps every promise that the kit asks of third parties; the replacements have a file of their own."""

from __future__ import annotations

from torch import nn
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextRMSNorm

from hp_core import ModelOutputLoss
from hp_core.testing import loss_checks, optimizer_checks, replacement_checks
from hp_core.testing.checks import Check
from hp_plugins.losses.causal_lm import CausalLMLoss
from hp_plugins.losses.chunked_causal_lm import ChunkedCausalLMLoss
from hp_plugins.optimizers.adamw import AdamW
from hp_plugins.optimizers.groups import ParameterGroup
from hp_plugins.optimizers.muon import Muon
from hp_plugins.optimizers.sgd import SGD
from hp_plugins.replacements.fused_qkv import fused_qkv
from hp_plugins.replacements.rms_norm import rms_norm


@loss_checks(ModelOutputLoss)
def test_model_output_loss(check: Check) -> None:
    check()


@loss_checks(CausalLMLoss)
def test_causal_lm_loss(check: Check) -> None:
    check()


@loss_checks(
    CausalLMLoss,
    family="qwen3_moe",
    label_smoothing=0.1,
    z_loss=1e-3,
    ignore_index=-1,
    token_weights="weights",
    router_balance=0.1,
    router_z_loss=0.01,
)
def test_causal_lm_loss_with_every_option(check: Check) -> None:
    check()


@loss_checks(ChunkedCausalLMLoss, family="qwen3_moe", chunk_size=5, router_balance=0.1, router_z_loss=0.01)
def test_chunked_causal_lm_loss_of_a_mixture(check: Check) -> None:
    check()


@loss_checks(ChunkedCausalLMLoss)
def test_chunked_causal_lm_loss(check: Check) -> None:
    check()


@loss_checks(
    ChunkedCausalLMLoss,
    family="gemma2",
    memory_budget_mib=1,
)
def test_chunked_causal_lm_loss_of_capped_logits(check: Check) -> None:
    check()


@loss_checks(
    ChunkedCausalLMLoss,
    family="llama_tied",
    label_smoothing=0.1,
    z_loss=1e-3,
    ignore_index=-1,
    token_weights="weights",
    chunk_size=7,
)
def test_chunked_causal_lm_loss_with_every_option(check: Check) -> None:
    check()


@optimizer_checks(AdamW, lr=1e-3)
def test_adamw(check: Check) -> None:
    check()


@optimizer_checks(AdamW, lr=1e-3, fused=False, groups=[ParameterGroup(match="*weight", lr=2e-3)])
def test_adamw_with_groups(check: Check) -> None:
    check()


@optimizer_checks(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
def test_sgd(check: Check) -> None:
    check()


# Its matrices are orthogonalised whole on every rank, so the update is exact on shards as well.
@optimizer_checks(Muon, family="qwen3_moe", tolerance=0.0, lr=0.02, adamw_lr=1e-3)
def test_muon(check: Check) -> None:
    check()


@replacement_checks(
    rms_norm,
    family="qwen3_vl_moe",
    match="*language_model*norm",
    module_type=Qwen3VLMoeTextRMSNorm,
    refuses=[nn.LayerNorm(8)],
)
def test_rms_norm_of_a_vision_language_model(check: Check) -> None:
    check()


@replacement_checks(fused_qkv, family="qwen3", match="*.self_attn", refuses=[nn.Linear(8, 8)])
def test_fused_qkv_with_norms_inside(check: Check) -> None:
    check()
