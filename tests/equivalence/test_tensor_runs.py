"""Whole runs on tensor ranks: optimizers, clipping, evaluation and checkpoints give what one process gives."""

from __future__ import annotations

import pytest

from hp_core.testing.ranks import RankError
from tests.contract.texts import write_texts
from tests.e2e.runs import hp_train_here, recipe, steps, train

TP2 = "--accelerator.tp_size=2"
ADAMW = ["--training.train_iters=5"]
MUON = ["--optimizer={name: muon, lr: 0.02, adamw_lr: 1e-2}", "--training.train_iters=3"]


@pytest.mark.layouts
@pytest.mark.parametrize(("settings", "tolerance"), [(ADAMW, 1e-5), (MUON, 5e-5)], ids=["adamw", "muon"])
def test_weights_after_some_steps_agree(tmp_path, settings, tolerance):
    """Muon's iteration runs in bf16: gradients that differ in the last fp32 bit soon round apart, on any ranks."""
    path = recipe(tmp_path, "qwen3")
    alone = train(path, *settings, out=tmp_path / "alone")
    for nproc in (2, 4):
        rows = train(path, *settings, TP2, nproc=nproc, out=tmp_path / str(nproc))
        assert steps(rows) == pytest.approx(steps(alone), abs=tolerance)
        assert steps(rows, "grad_norm")[:2] == pytest.approx(steps(alone, "grad_norm")[:2], rel=1e-5)
        assert steps(rows, "tokens") == steps(alone, "tokens")


def test_gradients_are_clipped_to_the_norm_of_all_ranks(tmp_path):
    path = recipe(tmp_path, "qwen3")
    settings = ["--training.max_grad_norm=0.1", "--optimizer={name: sgd, lr: 1.0}", "--training.train_iters=3"]
    alone = train(path, *settings, out=tmp_path / "alone")
    rows = train(path, *settings, TP2, nproc=4, out=tmp_path / "four")
    assert steps(rows) == pytest.approx(steps(alone), abs=1e-6)
    assert min(steps(rows, "grad_norm")) > 0.1


def test_evaluation_counts_each_token_once(tmp_path):
    path = recipe(tmp_path)
    settings = ["--dataset.validation_rows=8", "--dataset.validation_silent=[3]", "--training.train_iters=1"]
    alone = train(path, *settings, out=tmp_path / "alone")[-1]
    for nproc in (2, 4):
        found = train(path, *settings, TP2, nproc=nproc, out=tmp_path / str(nproc))[-1]
        assert found["eval_tokens"] == alone["eval_tokens"]
        assert found["eval_loss"] == pytest.approx(alone["eval_loss"], abs=1e-6)


LAYOUTS = {"one": (1, []), "tp2": (2, [TP2]), "fsdp2": (2, []), "fsdp2 tp2": (4, [TP2])}


@pytest.mark.parametrize(
    ("first", "second"), [("tp2", "one"), ("one", "tp2"), ("fsdp2 tp2", "fsdp2"), ("fsdp2", "fsdp2 tp2")]
)
@pytest.mark.parametrize("family", ["qwen3"])
def test_a_run_goes_on_with_another_number_of_tensor_ranks(tmp_path, family, first, second):
    path = recipe(tmp_path, family)
    unbroken = train(path, out=tmp_path / "unbroken")
    out = tmp_path / "broken"
    (nproc, layout), (next_nproc, next_layout) = LAYOUTS[first], LAYOUTS[second]
    train(path, *layout, "--training.stop_after=3", nproc=nproc, out=out)
    rows = train(path, *next_layout, "--checkpoint.resume=latest", nproc=next_nproc, out=out)
    assert steps(rows, "step") == list(range(1, 7))
    assert steps(rows) == pytest.approx(steps(unbroken), abs=1e-5)


def test_stop_and_go_on_tensor_ranks_is_exact_with_dropout(tmp_path):
    path = recipe(tmp_path)
    settings = ["--model.config.attention_dropout=0.2", TP2]
    unbroken = train(path, *settings, nproc=2, out=tmp_path / "unbroken")
    out = tmp_path / "broken"
    train(path, *settings, "--training.stop_after=3", nproc=2, out=out)
    rows = train(path, *settings, "--checkpoint.resume=latest", nproc=2, out=out)
    assert steps(rows) == steps(unbroken)
    assert steps(rows, "grad_norm") == steps(unbroken, "grad_norm")


CUT = [TP2, "--accelerator.sequence_parallel=true", "--accelerator.loss_parallel=true"]


def test_a_run_with_sequences_and_loss_cut_goes_on_with_one_rank(tmp_path):
    path = recipe(tmp_path, "qwen3")
    settings = ["--loss_fn=causal_lm", "--model.config.vocab_size=97", "--dataset.validation_rows=8"]
    # Adam's first steps are as large for a gradient that is all rounding; a larger eps keeps those of one still.
    settings.append("--optimizer.eps=1e-6")
    unbroken = train(path, *settings, out=tmp_path / "unbroken")
    out = tmp_path / "broken"
    train(path, *settings, *CUT, "--training.stop_after=3", nproc=4, out=out)
    rows = train(path, *settings, "--checkpoint.resume=latest", out=out)
    assert steps(rows, "step") == list(range(1, 7))
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4), ("tokens", 0)):
        assert steps(rows, name) == pytest.approx(steps(unbroken, name), abs=tolerance)
    assert rows[-1]["eval_loss"] == pytest.approx(unbroken[-1]["eval_loss"], abs=1e-5)


def test_text_is_sampled_of_whole_logits(tmp_path):
    """Rows of 15 tokens, which two ranks can't share evenly, and a prompt that grows by a token at a time."""
    write_texts(tmp_path)
    dataset = f"{{name: text, files: {tmp_path}/some, max_seq_len: 15, tokenizer: bytes}}"
    settings = [
        "--loss_fn=causal_lm",
        "--model.config.vocab_size=301",
        f"--dataset={dataset}",
        "--training.train_iters=2",
        "--evaluation.samples={prompts: [ab], max_new_tokens: 4, temperature: 0}",
    ]
    path = recipe(tmp_path)
    alone = train(path, *settings, out=tmp_path / "alone")
    rows = train(path, *settings, *CUT, nproc=2, out=tmp_path / "cut")
    assert steps(rows) == pytest.approx(steps(alone), abs=1e-5)
    first, second = ((tmp_path / one / "samples.jsonl").read_text() for one in ("alone", "cut"))
    assert first == second


@pytest.mark.parametrize(
    ("loss", "name"),
    [("focal", "FocalLoss"), ("{name: z_loss, loss: causal_lm}", "ZLoss"), ("model_output", "ModelOutputLoss")],
)
def test_other_losses_are_refused_where_logits_stay_parts(tmp_path, loss, name):
    with pytest.raises(RankError, match=f"loss_fn: {name} needs the logits of the whole vocabulary, and loss"):
        train(recipe(tmp_path), *CUT, f"--loss_fn={loss}", nproc=2)


@pytest.mark.parametrize("key", ["sequence_parallel", "loss_parallel"])
def test_keys_that_would_have_no_effect_are_refused(tmp_path, key):
    done = hp_train_here("check", str(recipe(tmp_path)), f"--accelerator.{key}=true")
    assert done.returncode == 2
    assert f"accelerator.{key}: there is one tensor rank, which has nothing to share" in done.stderr


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        (
            ["--launch.nproc=3", "--accelerator.tp_size=3", "--model.config.intermediate_size=50"],
            [
                "accelerator.tp_size: 4 attention heads can't be shared by 3 ranks; use 1 or 2",
                "accelerator.tp_size: 2 key and value heads can't be shared by 3 ranks; use 1 or 2",
                "accelerator.tp_size: an MLP of width 50 can't be shared by 3 ranks; use 1 or 2",
            ],
        ),
        (["--launch.nproc=3", TP2], ["accelerator: tp_size 2 needs a multiple of 2 ranks, and there are 3"]),
    ],
)
def test_what_can_not_be_shared_is_told_before_a_process_starts(tmp_path, changes, messages):
    done = hp_train_here("check", str(recipe(tmp_path)), *changes)
    assert done.returncode == 2
    for message in messages:
        assert message in done.stderr
