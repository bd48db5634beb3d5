"""Runs with adapters: what their first lines say, what is trained, and going on bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hp_core.checkpoint.layout import complete_checkpoints
from hp_core.observe.trackers import read_metrics
from tests.e2e.runs import hp_train_here, manifest, recipe, steps, train
from tests.equivalence.test_distillation import distilling, saved_teacher

pytest.importorskip("peft")
LORA = "--peft={method: lora, r: 4, use_dora: true, lora_dropout: 0.2}"
LOOK = """\
from hp_core import hookimpl


def sums(run):
    return {name: float(one.detach().double().sum()) for name, one in run.model.named_parameters()}


@hookimpl
def on_train_start(run):
    names = {id(one): name for name, one in run.model.named_parameters()}
    held = [names[id(one)] for group in run.optimizer.param_groups for one in group["params"]]
    run.record(optimized=held, kept=sums(run))


@hookimpl
def on_train_end(run):
    run.record(at_end=sums(run))
"""


def test_adapters_alone_are_trained_and_the_first_lines_say_so(tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    path = recipe(tmp_path)
    done = hp_train_here(str(path), "--plugins=[./look.py]", LORA, "--peft.target_modules=[q_proj, v_proj]")
    assert done.returncode == 0, done.stderr
    # Of each of 2 layers: 4 x (32 + 32) + 32 and 4 x (32 + 16) + 16, of a model of 21,664.
    trained = 2 * (4 * 64 + 32 + 4 * 48 + 16)
    total = 21_664 + trained
    assert f"peft: trains {trained:,} of {total:,} parameters ({trained / total:.2%}), in 4 layers\n" in done.stdout
    found = manifest(tmp_path / "run")
    assert len(found["optimized"]) == 4 * 3
    assert all(".lora_" in name for name in found["optimized"])
    moved = {name for name, value in found["kept"].items() if found["at_end"][name] != value}
    assert moved == set(found["optimized"])


@pytest.mark.parametrize(
    ("nproc", "layout"), [(1, ()), (2, ()), (2, ("--accelerator.tp_size=2",)), (2, ("--accelerator.pp_size=2",))]
)
def test_stop_and_go_equals_the_unbroken_run_bit_for_bit(tmp_path: Path, nproc: int, layout: tuple[str, ...]) -> None:
    path = recipe(tmp_path)
    settings = (LORA, *layout, "--lr_scheduler={name: cosine, warmup_steps: 3}")
    unbroken = train(path, *settings, nproc=nproc, out=tmp_path / "unbroken")
    out = tmp_path / "broken"
    for stop_after in (1, 4, 6):
        resume = [] if stop_after == 1 else ["--checkpoint.resume=latest"]
        rows = train(path, *settings, f"--training.stop_after={stop_after}", *resume, nproc=nproc, out=out)
    for name in ("step", "loss", "grad_norm", "lr"):
        assert steps(rows, name) == steps(unbroken, name), name
    assert steps(unbroken)[-1] < steps(unbroken)[0]


def test_a_run_goes_on_with_other_ranks(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    lora = "--peft={method: lora, r: 4, use_dora: true, modules_to_save: lm_head}"
    alone = train(path, lora, out=tmp_path / "alone")
    train(path, lora, "--training.stop_after=3", out=tmp_path / "run")
    resumed = ("--checkpoint.resume=latest", "--accelerator.tp_size=2")
    rows = train(path, lora, *resumed, nproc=2, out=tmp_path / "run")
    assert steps(rows) == pytest.approx(steps(alone), abs=1e-5)
    (checkpoint, *_) = complete_checkpoints(tmp_path / "run")
    optimized = checkpoint.trainer_state()["optimizer_state"]
    assert optimized
    assert all(".lora_" in name or ".modules_to_save." in name for name in optimized)


@pytest.mark.parametrize("factory", ["fused_qkv", "sdpa_attention", "swiglu", "rms_norm"])
def test_adapters_in_replaced_modules(tmp_path: Path, factory: str) -> None:
    match = {"swiglu": "*.mlp", "rms_norm": "*norm"}.get(factory, "*.self_attn")
    entry = f"--plan_overrides={json.dumps([{'match': match, 'replace_module': factory}])}"
    lora = "--peft={method: lora, init_lora_weights: false}"
    rows = train(recipe(tmp_path), lora, entry, nproc=2, out=tmp_path / "replaced")
    if factory == "fused_qkv":
        assert steps(rows)[-1] < steps(rows)[0]
    else:
        plain = train(recipe(tmp_path), lora, nproc=2, out=tmp_path / "plain")
        assert steps(rows) == pytest.approx(steps(plain), abs=1e-4)
    done = hp_train_here(str(recipe(tmp_path)), "--peft={method: lora, target_modules: q_proj}", entry)
    assert done.returncode == (2 if factory == "fused_qkv" else 0)
    assert ("'q_proj' matches no module of the model; did you mean 'qkv_proj'?" in done.stderr) == bool(done.returncode)


def test_a_teacher_has_no_adapters_and_evaluation_leaves_training_alone(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    common = [distilling(saved_teacher(tmp_path / "teacher")), LORA, "--dataset.validation_rows=4"]
    rows = train(path, *common, "--evaluation.every=1", out=tmp_path / "evaluated")
    plain = train(path, *common, "--evaluation.at_end=false", out=tmp_path / "plain")
    assert steps(rows) == steps(plain)
    evaluated = [row["eval_loss"] for row in read_metrics(tmp_path / "evaluated") if "eval_loss" in row]
    assert len(evaluated) == 6
    assert evaluated[-1] < evaluated[0]
