"""The Qwen3-VL-MoE example as it is told to users: the recipe's text letter for letter, with a factory of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hp_core.config import load_recipe
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.training.session import train
from tests.model.replacement.rules import replacing

EXAMPLE = """\
plan_overrides:
  - match: "*.language_model.layers.*.input_layernorm"
    module_type: transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeTextRMSNorm
    exact_type: true
    replace_module:
      _target_: my_project.modules.replace_rms_norm
"""
MODULES = """\
import torch
from torch import nn

from hp_core import module_replacement


class MyRMSNorm(nn.Module):
    def __init__(self, weight, eps):
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, hidden_states):
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)


@module_replacement
def replace_rms_norm(module, module_fqn, context):
    return MyRMSNorm(module.weight, module.variance_epsilon)
"""
MODEL = """\
import torch
from torch import nn
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from hp_core import finish_model

TEXT = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
)
VISION = dict(
    depth=2, hidden_size=16, num_heads=2, intermediate_size=32, patch_size=16, out_hidden_size=32,
    num_position_embeddings=64, deepstack_visual_indexes=[0, 1],
)


def build(*, distributed_setup) -> nn.Module:
    config = Qwen3VLMoeConfig(text_config=TEXT, vision_config=VISION, image_token_id=90)
    with torch.device("meta"):
        model = Qwen3VLMoeForConditionalGeneration(config)
    finish_model(model, distributed_setup)
    return model
"""
REST = """\
model: {_target_: my_project.model.build}
dataset: {_target_: tests.e2e.parts.numbered_rows}
loss_fn: causal_lm
optimizer: {name: adamw, lr: 1e-3}
training: {train_iters: 2, global_batch_size: 4, seed: 3}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "my_project"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "modules.py").write_text(MODULES)
    (package / "model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def recipe(project: Path, text: str) -> Any:
    path = project / "recipe.yaml"
    path.write_text(text + REST + f"output_dir: {project / 'run'}\n")
    return load_recipe(path)


def test_the_example_replaces_the_layers_norms_of_the_text_model(project: Path) -> None:
    loaded = recipe(project, EXAMPLE)
    logits = {}
    ids = torch.arange(24).reshape(2, 12) * 7 % 88
    for rules in ((), tuple(loaded.config.plan_overrides)):
        with replacing(*rules) as setup:
            model = loaded.config.model.build(distributed_setup=setup).eval()
            replaced = sorted(name for name, one in model.named_modules() if type(one).__name__ == "MyRMSNorm")
            logits[len(replaced)] = model(input_ids=ids).logits
    assert replaced == [f"model.language_model.layers.{layer}.input_layernorm" for layer in (0, 1)]
    torch.testing.assert_close(logits[2], logits[0], rtol=0, atol=1e-6)


def test_the_example_trains(project: Path) -> None:
    report = train(recipe(project, EXAMPLE), environment=ProcessEnvironment())
    plain = train(recipe(project, "checkpoint: {save_last: false}\n"), environment=ProcessEnvironment(), overwrite=True)
    assert report.steps == 2
    assert report.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-6)
