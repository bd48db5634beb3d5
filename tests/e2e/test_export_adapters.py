"""Adapters of `peft` are merged by an export, so that plain transformers computes what the run trained."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hp_core.parallel.setup import DistributedSetup
from hp_plugins.models.causal_lm import causal_lm
from tests.e2e.runs import hp_train_here, manifest
from tests.e2e.test_export import WATCHER, a_recipe, export, reload

pytest.importorskip("peft")
# What peft itself calls, and what it says of tied weights, which is refused here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]


def adapted(
    config: dict[str, Any], settings: dict[str, Any], inject: bool = False, *, distributed_setup: DistributedSetup
) -> Any:
    """What a user writes who wants adapters: the model of the recipe, and peft's around it or in it."""
    from peft import LoraConfig, get_peft_model, inject_adapter_in_model

    model = causal_lm(config=config, distributed_setup=distributed_setup)
    lora = LoraConfig(task_type="CAUSAL_LM", **settings)
    return inject_adapter_in_model(lora, model) if inject else get_peft_model(model, lora)


LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"]}


def run_adapted(
    folder: Path, settings: dict[str, Any], inject: bool = False, extra: str = "", **config: Any
) -> subprocess.CompletedProcess[str]:
    """Train three steps with adapters on a model of these values."""
    (folder / "watcher.py").write_text(WATCHER)
    path = a_recipe(folder, "llama", f"plugins: [./watcher.py]\n{extra}")
    text = path.read_text()
    model, _, rest = text.partition("dataset:\n")
    model = model.replace("  name: causal_lm\n", f"  _target_: {__name__}.adapted\n")
    model += "".join(f"    {key}: {json.dumps(value)}\n" for key, value in config.items())
    model += f"  settings: {json.dumps(settings)}\n  inject: {json.dumps(inject)}\n"
    path.write_text(f"{model}dataset:\n{rest}")
    return hp_train_here(str(path), "--training.train_iters=3")


CASES: dict[str, dict[str, Any]] = {
    "plain": {"settings": LORA},
    "injected": {"settings": {**LORA, "use_rslora": True}, "inject": True},
    "with a module trained whole": {"settings": {**LORA, "modules_to_save": ["lm_head"]}},
    "in replaced modules": {
        "settings": {"r": 4, "target_modules": ["qkv_proj", "o_proj"]},
        "extra": 'plan_overrides:\n  - match: "*.self_attn"\n    replace_module: {name: fused_qkv}\n',
    },
}


def test_a_fresh_process_computes_what_was_trained(tmp_path):
    wanted = {}
    for name, case in CASES.items():
        (tmp_path / name).mkdir()
        done = run_adapted(tmp_path / name, **case)
        assert done.returncode == 0, done.stderr
        export(tmp_path / name / "run", tmp_path / name / "out")
        wanted[name] = torch.load(tmp_path / name / "run" / "logits.pt", weights_only=True)
        tensors = load_file(tmp_path / name / "out" / "model.safetensors")
        assert not any("lora" in one or "base" in one for one in tensors)
        assert "model.layers.1.self_attn.q_proj.weight" in tensors
        assert not (tmp_path / name / "out" / "adapter_config.json").exists()
    for name, logits in zip(CASES, reload(*(tmp_path / name / "out" for name in CASES)), strict=True):
        torch.testing.assert_close(logits, wanted[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({**LORA, "use_dora": True}, "is no plain LoRA"),
        ({**LORA, "target_modules": ["embed_tokens"]}, "only LoRA of linear layers is merged"),
    ],
)
def test_adapters_that_are_no_plain_weights_are_told_before_the_first_step(settings, reason, tmp_path):
    done = run_adapted(tmp_path, settings)
    assert done.returncode == 0, done.stderr
    record = manifest(tmp_path / "run")["export"]
    assert not record["possible"]
    assert reason in record["why"]
    assert f"the trained model can't be exported: {record['why']}" in done.stdout
    done = hp_train_here("export", str(tmp_path / "run"), "--to", str(tmp_path / "out"))
    assert done.returncode == 2
    assert reason in done.stderr


def test_an_adapter_of_one_of_two_tied_weights_is_refused(tmp_path):
    done = run_adapted(tmp_path, {**LORA, "target_modules": ["lm_head"]}, tie_word_embeddings=True)
    assert done.returncode == 2
    assert "ties 'lm_head.weight' to 'model.embed_tokens.weight'" in done.stderr
    assert "set model.config.tie_word_embeddings: false" in done.stderr
