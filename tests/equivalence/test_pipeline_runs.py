"""Whole runs in stages: metrics, evaluations, samples, parameter groups and checkpoints are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel

from hp_core.config.models import AcceleratorConfig
from hp_core.errors import InputError
from hp_core.model.export import export_model
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.pipeline.runner import pipeline_of
from hp_core.testing.ranks import run_ranks
from tests.contract.texts import write_texts
from tests.e2e.runs import recipe, steps, train
from tests.model.tiny import FAMILIES, a_setup, build, whole

PP2 = "--accelerator.pp_size=2"
LAYOUTS = {
    "one": (1, []),
    "pp2": (2, [PP2]),
    "interleaved": (2, [PP2, "--accelerator.pp_schedule=interleaved_1f1b"]),
    "fsdp2 pp2": (4, [PP2]),
    "tp2": (2, ["--accelerator.tp_size=2"]),
}
BASE = ["--training.global_batch_size=8", "--training.micro_batch_size=1", "--model.config.num_hidden_layers=4"]


def run(path: Path, layout: str, *overrides: str, out: Path) -> list[dict[str, Any]]:
    nproc, accelerator = LAYOUTS[layout]
    return train(path, *BASE, *accelerator, *overrides, nproc=nproc, out=out)


@pytest.mark.parametrize("layout", ["pp2", pytest.param("fsdp2 pp2", marks=pytest.mark.layouts)])
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.layouts)])
def test_metrics_and_evaluations_agree(tmp_path, family, layout):
    path = recipe(tmp_path, family)
    settings = ["--dataset.validation_rows=3", "--evaluation.every=3", "--training.max_grad_norm=0.5"]
    alone = run(path, "one", *settings, out=tmp_path / "one")
    found = run(path, layout, *settings, out=tmp_path / "stages")
    assert steps(found) == pytest.approx(steps(alone), abs=1e-5)
    assert steps(found, "grad_norm") == pytest.approx(steps(alone, "grad_norm"), rel=1e-4)
    for name in ("tokens", "samples", "lr"):
        assert steps(found, name) == steps(alone, name)
    evaluations = [[row["eval_loss"] for row in rows if "eval_loss" in row] for rows in (found, alone)]
    assert evaluations[0] == pytest.approx(evaluations[1], abs=1e-5)
    assert len(evaluations[0]) == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("pp2", "one"),
        ("one", "interleaved"),
        pytest.param("pp2", "fsdp2 pp2", marks=pytest.mark.layouts),
        pytest.param("tp2", "pp2", marks=pytest.mark.layouts),
        pytest.param("pp2", "tp2", marks=pytest.mark.layouts),
    ],
)
@pytest.mark.parametrize("optimizer", ["{name: adamw, lr: 1e-2}", "{name: muon, lr: 0.01, adamw_lr: 1e-2}"])
def test_a_run_goes_on_in_other_stages(tmp_path, optimizer, first, second):
    path = recipe(tmp_path)
    settings = [f"--optimizer={optimizer}", "--lr_scheduler={name: cosine, warmup_steps: 2}"]
    unbroken = run(path, "one", *settings, out=tmp_path / "unbroken")
    run(path, first, *settings, "--training.stop_after=3", out=tmp_path / "broken")
    rows = run(path, second, *settings, "--checkpoint.resume=latest", out=tmp_path / "broken")
    assert steps(rows, "step") == [1, 2, 3, 4, 5, 6]
    assert steps(rows) == pytest.approx(steps(unbroken), abs=2e-5 if "adamw, lr" in optimizer else 2e-3)
    assert steps(rows, "lr") == steps(unbroken, "lr")


def test_the_same_stages_go_on_bit_for_bit_with_dropout(tmp_path):
    path = recipe(tmp_path)
    settings = ["--model.config.attention_dropout=0.2"]
    unbroken = run(path, "pp2", *settings, out=tmp_path / "unbroken")
    run(path, "pp2", *settings, "--training.stop_after=3", out=tmp_path / "broken")
    rows = run(path, "pp2", *settings, "--checkpoint.resume=latest", out=tmp_path / "broken")
    assert steps(rows) == steps(unbroken)


def test_a_group_whose_parameters_are_in_one_stage_is_that_of_all(tmp_path):
    path = recipe(tmp_path)
    groups = "[{match: 'model.layers.3.*', lr: 0.1}, {match: '*.0.*norm*', weight_decay: 0.3}]"
    settings = [f"--optimizer={{name: adamw, lr: 1e-2, groups: {groups}}}", "--lr_scheduler={name: cosine}"]
    alone = run(path, "one", *settings, out=tmp_path / "one")
    found = run(path, "pp2", *settings, out=tmp_path / "stages")
    assert steps(found) == pytest.approx(steps(alone), abs=1e-5)


def test_groups_are_in_the_order_of_the_model_in_every_stage(tmp_path):
    """Their rates are restored by number. Layers 1 and 2 are on the second and the first rank."""
    path = recipe(tmp_path)
    groups = "[{match: 'model.layers.1.*', lr: 0.1}, {match: 'model.layers.2.*', lr: 0.2}]"
    settings = [
        f"--optimizer={{name: sgd, lr: 1e-2, groups: {groups}}}",
        "--lr_scheduler={_target_: torch.optim.lr_scheduler.StepLR, step_size: 2}",
    ]
    unbroken = run(path, "one", *settings, out=tmp_path / "unbroken")
    run(path, "one", *settings, "--training.stop_after=3", out=tmp_path / "broken")
    rows = run(path, "interleaved", *settings, "--checkpoint.resume=latest", out=tmp_path / "broken")
    assert steps(rows) == pytest.approx(steps(unbroken), abs=2e-6)


def test_a_stage_may_be_frozen_as_a_whole(tmp_path):
    path = recipe(tmp_path)
    frozen = "[{match: ['model.embed_tokens*', 'model.layers.0.*', 'model.layers.1.*'], frozen: true}]"
    settings = [f"--optimizer={{name: adamw, lr: 1e-2, groups: {frozen}}}"]
    alone = run(path, "one", *settings, out=tmp_path / "one")
    found = run(path, "pp2", *settings, out=tmp_path / "stages")
    assert steps(found) == pytest.approx(steps(alone), abs=1e-5)
    assert steps(found, "grad_norm") == pytest.approx(steps(alone, "grad_norm"), rel=1e-4)


def test_text_is_sampled_through_all_stages(tmp_path):
    write_texts(tmp_path)
    settings = [
        "--loss_fn=chunked_causal_lm",
        "--model.config.vocab_size=301",
        f"--dataset={{name: text, files: {tmp_path}/some, max_seq_len: 16, tokenizer: bytes}}",
        "--training.train_iters=2",
        "--evaluation.samples={prompts: [ab], max_new_tokens: 4, temperature: 0}",
    ]
    path = recipe(tmp_path)
    for layout in ("one", "pp2"):
        run(path, layout, *settings, out=tmp_path / layout)
    first, second = ((tmp_path / one / "samples.jsonl").read_text() for one in ("one", "pp2"))
    assert first == second


def test_the_last_step_of_an_epoch_has_fewer_micro_batches(tmp_path):
    path = recipe(tmp_path)
    settings = ["--training={train_epochs: 1, global_batch_size: 16, micro_batch_size: 1, seed: 3}"]
    alone = run(path, "one", *settings, out=tmp_path / "one")
    found = run(path, "interleaved", *settings, out=tmp_path / "stages")
    assert steps(found) == pytest.approx(steps(alone), abs=1e-5)
    assert steps(found, "tokens") == steps(alone, "tokens")


def test_replaced_modules_are_in_their_stages(tmp_path):
    extra = "plan_overrides:\n  - match: '*norm'\n    replace_module: rms_norm\n"
    extra += "  - match: '*.self_attn'\n    replace_module: fused_qkv\n"
    path = recipe(tmp_path, extra=extra)
    alone = run(path, "one", out=tmp_path / "one")
    found = run(path, "pp2", out=tmp_path / "stages")
    assert steps(found) == pytest.approx(steps(alone), abs=1e-5)


CONFIGS = {name: {**FAMILIES[name], "num_hidden_layers": 4} for name in ("llama_tied", "qwen3_moe", "deepseek_v3")}


def weights(
    environment: ProcessEnvironment, name: str, pp_size: int, pretrained: str | None, exported: str | None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The whole weights of the rank's stages, and the logits of the whole model."""
    schedule = {"pp_schedule": "interleaved_1f1b"} if environment.world_size == 2 else {}
    with a_setup(environment, accelerator=AcceleratorConfig(pp_size=pp_size, **schedule)) as setup:
        model = build(setup, None if pretrained else CONFIGS[name], pretrained=pretrained)
        if exported:
            export_model(model, exported)
        with torch.no_grad():
            logits = model(input_ids=torch.arange(8)[None], use_cache=False).logits
        if (pipeline := pipeline_of(model)) is not None:
            held = {id(one) for stage in pipeline.stages for one in stage.view.parameters()}
            assert held == {id(one) for one in model.parameters()}
        return {fqn: whole(value) for fqn, value in model.state_dict().items()}, logits


@pytest.mark.parametrize("name", CONFIGS)
def test_stages_start_read_and_write_the_weights_of_one_process(tmp_path, name):
    directory = str(tmp_path / "model")
    ((wanted, logits),) = run_ranks(weights, 1, name, 1, None, directory)
    for nproc, pretrained in ((2, None), (2, directory), (4, None)):
        exported = str(tmp_path / f"{nproc} {pretrained is None}")
        by_rank = run_ranks(weights, nproc, name, 2, pretrained, exported)
        found = {fqn: value for tensors, _ in by_rank for fqn, value in tensors.items()}
        assert set(found) == set(wanted)
        assert all(torch.equal(found[fqn], value) for fqn, value in wanted.items())
        assert all(torch.allclose(one, logits, atol=1e-6) for _, one in by_rank)
        written = AutoModelForCausalLM.from_pretrained(exported).state_dict()
        assert all(torch.equal(written[fqn], value) for fqn, value in wanted.items())


def refused(environment: ProcessEnvironment, family: str, schedule: str, changed: bool) -> str:
    """What a model that can't be cut into stages is refused with."""
    accelerator = AcceleratorConfig(pp_size=2, pp_schedule=schedule)
    forward = LlamaModel.forward
    if changed:
        LlamaModel.forward = lambda *args, **kwargs: _doubled(forward(*args, **kwargs))
    layers = {} if family == "gpt2" else {"num_hidden_layers": 4}
    with a_setup(environment, accelerator=accelerator) as setup, pytest.raises(InputError) as error:
        build(setup, {**FAMILIES[family], **layers})
    return str(error.value)


def _doubled(output: Any) -> Any:
    output.last_hidden_state = output.last_hidden_state * 2
    return output


@pytest.mark.parametrize(
    ("family", "schedule", "changed", "message"),
    [
        ("gpt2", "1f1b", False, "GPT2LMHeadModel can't be cut into stages: transformers has no plan for its stages"),
        ("llama", "1f1b", True, "LlamaForCausalLM changes hidden states outside of its layers, so it has no stages"),
        ("llama_tied", "zbv_zero_bubble", False, "has the first and the last stage on one rank"),
    ],
)
def test_models_without_stages_are_refused(family, schedule, changed, message):
    for found in run_ranks(refused, 2, family, schedule, changed):
        assert message in found
