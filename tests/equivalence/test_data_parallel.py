"""The same numbers however the batch is cut: micro-batches, data ranks, shards and replicas."""

from __future__ import annotations

import pytest

from tests.e2e.runs import recipe, steps, train

LAYOUTS = [
    (1, ["--training.micro_batch_size=2"]),
    (1, ["--training.micro_batch_size=4"]),
    (2, []),
    (2, ["--training.micro_batch_size=2"]),
    (2, ["--fsdp_config.reshard_after_forward=false"]),
    (2, ["--fsdp_config.dp_replicate_size=2"]),
    (4, []),
    (4, ["--fsdp_config.dp_replicate_size=2"]),
]


@pytest.mark.parametrize(
    ("model_type", "loss"),
    [
        ("llama", "model_output"),
        ("qwen3_moe", "causal_lm"),
        pytest.param("llama", "causal_lm", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "model_output", marks=pytest.mark.slow),
    ],
)
def test_losses_and_norms_do_not_depend_on_the_layout(tmp_path, model_type, loss):
    path = recipe(tmp_path, model_type)
    common = [f"--loss_fn={loss}", "--training.train_iters=5"]
    alone = train(path, *common, out=tmp_path / "alone")
    assert len(steps(alone)) == 5
    for index, (nproc, overrides) in enumerate(LAYOUTS):
        rows = train(path, *common, *overrides, nproc=nproc, out=tmp_path / str(index))
        assert steps(rows) == pytest.approx(steps(alone), abs=1e-5), (nproc, overrides)
        assert steps(rows, "grad_norm") == pytest.approx(steps(alone, "grad_norm"), rel=1e-4), (nproc, overrides)
        assert steps(rows, "tokens") == steps(alone, "tokens")
        assert steps(rows, "lr") == steps(alone, "lr")


def test_both_losses_agree(tmp_path):
    path = recipe(tmp_path)
    assert steps(train(path, "--loss_fn=model_output", out=tmp_path / "a")) == pytest.approx(
        steps(train(path, "--loss_fn=causal_lm", out=tmp_path / "b")), abs=1e-6
    )


@pytest.mark.parametrize("silent", [[0, 1, 2], list(range(0, 24, 2))])
def test_rows_without_targets_add_nothing_on_any_layout(tmp_path, silent):
    """Micro-batches and whole ranks without a target: finite, and the same as with all rows in one batch."""
    path = recipe(tmp_path)
    common = [f"--dataset.silent={silent}"]
    whole = train(path, *common, "--training.micro_batch_size=4", out=tmp_path / "whole")
    numbers = [index for index, loss in enumerate(steps(whole)) if loss is not None]
    assert len(numbers) >= 5
    for nproc in (1, 2, 4):
        for loss in ("model_output", "causal_lm"):
            out = tmp_path / f"{nproc}{loss}"
            rows = train(path, *common, f"--loss_fn={loss}", nproc=nproc, out=out)
            assert [i for i, loss in enumerate(steps(rows)) if loss is not None] == numbers
            for name in ("loss", "grad_norm"):
                found, expected = steps(rows, name), steps(whole, name)
                assert [found[i] for i in numbers] == pytest.approx([expected[i] for i in numbers], abs=1e-5)


def test_a_dict_loss_is_logged_by_name_and_summed(tmp_path):
    path = recipe(tmp_path)
    plain = train(path, "--loss_fn=causal_lm", "--training.train_iters=2", out=tmp_path / "plain")
    for nproc in (1, 2):
        rows = train(
            path,
            "--loss_fn={_target_: tests.e2e.parts.TwoPartLoss}",
            "--training.train_iters=1",
            nproc=nproc,
            out=tmp_path / f"two{nproc}",
        )
        assert rows[0]["main_loss"] == pytest.approx(plain[0]["loss"], abs=1e-5)
        assert rows[0]["tenth_loss"] == pytest.approx(plain[0]["loss"] / 10, abs=1e-6)
        assert rows[0]["loss"] == pytest.approx(1.1 * plain[0]["loss"], abs=1e-5)


@pytest.mark.parametrize("optimizer", ["{name: adamw, lr: 1e-2}", "{name: sgd, lr: 0.1, momentum: 0.9}"])
def test_weights_after_some_steps_agree(tmp_path, optimizer):
    path = recipe(tmp_path)
    alone = train(path, f"--optimizer={optimizer}", "--training.train_iters=8", out=tmp_path / "alone")
    two = train(path, f"--optimizer={optimizer}", "--training.train_iters=8", nproc=2, out=tmp_path / "two")
    assert steps(two) == pytest.approx(steps(alone), abs=1e-5)


def test_muon_is_exact_on_shards(tmp_path):
    path = recipe(tmp_path)
    common = ["--optimizer={name: muon, lr: 0.02, adamw_lr: 1e-2}", "--training.train_iters=6"]
    alone = train(path, *common, out=tmp_path / "alone")
    for nproc, extra in ((2, []), (4, ["--fsdp_config.dp_replicate_size=2"])):
        rows = train(path, *common, *extra, nproc=nproc, out=tmp_path / str(nproc))
        # Muon's iteration runs in bf16: gradients that differ in the last fp32 bit can round apart there.
        assert steps(rows) == pytest.approx(steps(alone), abs=2e-4)


def test_evaluation_covers_the_whole_set_whatever_the_ranks(tmp_path):
    path = recipe(tmp_path)
    common = ["--dataset.validation_rows=8", "--dataset.validation_silent=[3]", "--training.train_iters=1"]
    losses, tokens = [], []
    for nproc in (1, 2, 4):
        for micro_batch_size in (1, 3):
            rows = train(
                path,
                *common,
                f"--training.micro_batch_size={micro_batch_size}",
                "--training.global_batch_size=12",
                nproc=nproc,
                out=tmp_path / f"{nproc}-{micro_batch_size}",
            )
            losses.append(rows[-1]["eval_loss"])
            tokens.append(rows[-1]["eval_tokens"])
    assert losses == pytest.approx([losses[0]] * 6, abs=1e-6)
    # Row r leaves out r % 14 of 16 labels, row 3 all of them.
    assert set(tokens) == {sum(16 - r for r in range(8)) - 13}


@pytest.mark.parametrize("reshard", ["true", "false"])
def test_evaluating_between_steps_changes_nothing(tmp_path, reshard):
    """A forward pass without a backward pass leaves parameters gathered; no optimizer and no save may see them."""
    path = recipe(tmp_path)
    common = [f"--fsdp_config.reshard_after_forward={reshard}", "--dataset.validation_rows=3"]
    plain = train(path, *common, "--evaluation.at_end=false", nproc=2, out=tmp_path / "plain")
    out = tmp_path / "often"
    often = ["--evaluation.every=1", "--checkpoint.save_every=2"]
    train(path, *common, *often, "--training.stop_after=4", nproc=2, out=out)
    rows = train(path, *common, *often, "--checkpoint.resume=latest", nproc=2, out=out)
    assert steps(rows) == steps(plain)
