"""Adapters of `peft` are merged by an export, so that plain transformers computes what the run trained."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hp_core.export.adapter import Adapters
from hp_core.model.tiny import tiny_model
from hp_core.parallel.setup import DistributedSetup
from hp_plugins.models.causal_lm import causal_lm
from tests.e2e.runs import hp_train_here, recipe, train
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


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merged_weights_are_those_of_peft(family, use_dora):
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "embed_tokens", "lm_head"] if family == "llama" else ["c_attn", "wpe"]
    saved = ["model.norm"] if family == "llama" else ["ln_f"]
    settings = LoraConfig(r=4, lora_alpha=12, target_modules=targets, modules_to_save=saved, use_dora=use_dora)
    settings.fan_in_fan_out = family == "gpt2"
    model = get_peft_model(tiny_model(family), settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for one in model.parameters():
            if one.requires_grad:
                one.add_(torch.randn(one.shape, generator=generator) / 4)
    adapters = Adapters.from_dict(json.loads(json.dumps(Adapters.of(model).as_dict())))
    stored = dict(model.state_dict())
    found = adapters.merge(stored, list(adapters.sources(stored)))
    found = {name: one.clone() for name, one in found.items()}
    wanted = model.merge_and_unload().state_dict()
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        torch.testing.assert_close(found[name], one, rtol=1e-5, atol=1e-6)
    assert sum(not torch.equal(one, tiny_model(family).state_dict()[name]) for name, one in found.items()) > 3


RECIPES = {
    "lora": "--peft={method: lora, r: 4, lora_alpha: 16, target_modules: [q_proj, down_proj]}",
    "all-linear": "--peft={method: lora, use_rslora: true}",
    "ends": "--peft={method: lora, use_dora: true, target_modules: [v_proj, embed_tokens], modules_to_save: lm_head}",
    "dora": "--peft={method: lora, use_dora: true, exclude_modules: ['*.1.*']}",
}


# Stages take the embedding and the head as they are.
@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, axis) for name in RECIPES for axis in (None, "tp", "pp") if (name, axis) != ("ends", "pp")],
)
def test_adapters_alone_and_merged_compute_what_was_trained(tmp_path, name, layout):
    from peft import PeftModel

    base = tiny_model("llama")
    base.save_pretrained(tmp_path / "base")
    path = recipe(tmp_path)
    text = path.read_text()
    path.write_text(f"model: {{name: causal_lm, pretrained: {tmp_path / 'base'}}}\n{text[text.index('dataset:') :]}")
    shared = () if layout is None else (f"--accelerator.{layout}_size=2",)
    train(path, RECIPES[name], *shared, nproc=1 + len(shared))
    for option, folder in ((("--adapter",), "alone"), ((), "merged")):
        done = hp_train_here("export", str(tmp_path / "run"), "--to", str(tmp_path / folder), *option)
        assert done.returncode == 0, done.stderr
    assert sorted(one.name for one in (tmp_path / "alone").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "hp_export.json",
    ]
    config = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    merged = type(base).from_pretrained(tmp_path / "merged").eval()
    adapted = PeftModel.from_pretrained(type(base).from_pretrained(tmp_path / "base"), tmp_path / "alone").eval()
    ids = torch.arange(24).view(2, 12)
    wanted = merged(ids).logits
    torch.testing.assert_close(adapted(ids).logits, wanted, rtol=0, atol=1e-5)
    assert float((base.eval()(ids).logits - wanted).detach().abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "--adapter: it has no adapters"),
        (
            (
                "--plan_overrides=[{match: '*.self_attn', replace_module: fused_qkv}]",
                "--peft={method: lora, target_modules: qkv_proj}",
            ),
            "--adapter: peft can't put them into the plain model",
        ),
    ],
)
def test_adapters_that_peft_could_not_put_back_are_refused(tmp_path, overrides, message):
    path = recipe(tmp_path)
    train(path, *overrides, "--training.train_iters=1")
    done = hp_train_here("export", str(tmp_path / "run"), "--to", str(tmp_path / "out"), "--adapter")
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_one_of_two_tied_weights_is_refused(tmp_path):
    done = run_adapted(tmp_path, {**LORA, "target_modules": ["lm_head"]}, tie_word_embeddings=True)
    assert done.returncode == 2
    assert "ties 'lm_head.weight' to 'model.embed_tokens.weight'" in done.stderr
    assert "set model.config.tie_word_embeddings: false" in done.stderr
