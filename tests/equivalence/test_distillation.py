"""Distillation gives the numbers of one process however a step is cut, and its runs hold no trace of the teacher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from hp_core.model.tiny import tiny_config, tiny_model
from hp_core.testing.checks import without_progress_bars
from tests.e2e.runs import hp_train_here, recipe, steps, train

LAYOUTS = [
    (1, ["--training.micro_batch_size=2"]),
    (1, ["--training.micro_batch_size=4"]),
    (2, []),
    (2, ["--training.micro_batch_size=2", "--fsdp_config.reshard_after_forward=false"]),
    (4, ["--fsdp_config.dp_replicate_size=2"]),
]


def saved_teacher(directory: Path, family: str = "llama") -> str:
    """A teacher that is sure of itself, as a directory."""
    model = tiny_model(family, seed=1)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8.0)
    with without_progress_bars():
        model.save_pretrained(directory)
    return str(directory)


def distilling(pretrained: str, **arguments: Any) -> str:
    teacher = {"name": "causal_lm", "pretrained": pretrained, "attn_implementation": "eager"}
    section = {"name": "distillation", "teacher": teacher, **arguments}
    return f"--loss_fn={json.dumps(section)}"


@pytest.mark.parametrize("family", ["llama_tied", "gemma2"])
def test_losses_and_norms_do_not_depend_on_the_layout(tmp_path, family):
    path = recipe(tmp_path)
    teacher = saved_teacher(tmp_path / "teacher", family)
    common = [distilling(teacher, temperature=2.0, kl_weight=0.7, chunk_size=5), "--training.train_iters=3"]
    alone = train(path, *common, out=tmp_path / "alone")
    assert len(steps(alone)) == 3
    for index, (nproc, overrides) in enumerate(LAYOUTS):
        rows = train(path, *common, *overrides, nproc=nproc, out=tmp_path / str(index))
        for name in ("loss", "kl_divergence", "cross_entropy"):
            assert steps(rows, name) == pytest.approx(steps(alone, name), rel=1e-6), (nproc, overrides, name)
        assert steps(rows, "grad_norm") == pytest.approx(steps(alone, "grad_norm"), rel=1e-5), (nproc, overrides)


def test_rows_without_targets_add_nothing_on_any_layout(tmp_path):
    path = recipe(tmp_path)
    common = [
        distilling(saved_teacher(tmp_path / "teacher")),
        f"--dataset.silent={list(range(0, 24, 2))}",
        "--training.train_iters=3",
    ]
    whole = train(path, *common, "--training.micro_batch_size=4", out=tmp_path / "whole")
    for nproc in (1, 2, 4):
        rows = train(path, *common, nproc=nproc, out=tmp_path / str(nproc))
        for name in ("loss", "kl_divergence", "grad_norm"):
            assert steps(rows, name) == pytest.approx(steps(whole, name), rel=1e-5)


def test_a_student_comes_nearer_to_its_teacher_and_a_run_goes_on_with_it(tmp_path):
    path = recipe(tmp_path, extra="checkpoint: {save_every: 10}\n")
    common = [distilling(saved_teacher(tmp_path / "teacher"), kl_weight=1.0), "--training.train_iters=20"]
    rows = train(path, *common, nproc=2, out=tmp_path / "run")
    divergences = steps(rows, "kl_divergence")
    assert steps(rows) == divergences
    assert divergences[-1] < 0.5 * divergences[0]
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000010"
    names = stored_names(checkpoint)
    plain = tmp_path / "plain"
    train(path, "--loss_fn=causal_lm", "--training.train_iters=10", nproc=2, out=plain)
    assert names == stored_names(plain / "checkpoints" / "step_00000010")
    resumed = train(path, *common, f"--checkpoint.resume={checkpoint}", nproc=2, out=tmp_path / "resumed")
    assert steps(resumed)[-10:] == steps(rows)[-10:]


def stored_names(checkpoint: Path) -> set[str]:
    folder = next(one.parent for one in checkpoint.rglob(".metadata"))
    return set(FileSystemReader(str(folder)).read_metadata().state_dict_metadata)


def test_a_teacher_of_another_vocabulary_ends_the_run_at_its_place_in_the_recipe(tmp_path):
    teacher = {"name": "causal_lm", "config": {**tiny_config("llama"), "vocab_size": 90}}
    path = recipe(tmp_path, extra=f"loss_fn: {{name: distillation, teacher: {json.dumps(teacher)}}}\n")
    done = hp_train_here(str(path))
    assert done.returncode == 2
    line = path.read_text().splitlines().index(next(one for one in path.read_text().splitlines() if "loss_fn" in one))
    assert f"tiny.yaml:{line + 1}:" in done.stderr
    assert "loss_fn.teacher: has a vocabulary of 90, the model one of 96" in done.stderr


def test_what_is_wrong_with_a_teacher_is_found_by_check(tmp_path):
    path = recipe(tmp_path, extra="loss_fn: {name: distillation, teacher: {name: causal_lm, pretraned: x}}\n")
    done = hp_train_here("check", str(path))
    assert done.returncode == 2
    assert "loss_fn.teacher.pretraned: unknown argument of 'causal_lm'; did you mean 'pretrained'" in done.stderr


def test_check_tries_the_loss_with_a_tiny_teacher_in_place_of_the_recipe_s(tmp_path):
    teacher = {"name": "causal_lm", "pretrained": str(tmp_path / "nowhere")}
    section = {"name": "distillation", "teacher": teacher, "kl_weight": 0.5}
    path = recipe(tmp_path, extra=f"loss_fn: {json.dumps(section)}\n")
    done = hp_train_here("check", str(path))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2, done.stdout


def test_a_teacher_in_which_packed_documents_see_each_other_is_refused(tmp_path):
    config = {"model_type": "bloom", "vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    config["initializer_range"] = 0.5
    section = {
        "name": "distillation",
        "teacher": {"name": "causal_lm", "config": config, "attn_implementation": "eager"},
    }
    done = hp_train_here(str(recipe(tmp_path)), f"--loss_fn={json.dumps(section)}")
    assert done.returncode == 2
    assert "loss_fn: DistillationLoss does not keep packed documents apart" in done.stderr
    assert "Traceback" not in done.stderr
