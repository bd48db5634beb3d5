"""Numbers that are not finite, steps without targets, batches that can't be filled: decided alike on every rank."""

from __future__ import annotations

import pytest

from hp_core.observe.trackers import read_metrics
from hp_core.testing.ranks import RankError
from tests.e2e.runs import hp_train, hp_train_here, recipe, steps, train


def faulty(rank: int, call: int, value: str = "nan", times: int = 1) -> str:
    return (
        "--loss_fn={_target_: tests.e2e.parts.FaultyLoss, "
        f"rank: {rank}, call: {call}, value: '{value}', times: {times}}}"
    )


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_culprit(tmp_path, value):
    path = recipe(tmp_path)
    # Two micro-batches a rank and step: the sixth call is step 3's second.
    with pytest.raises(RankError) as caught:
        train(path, faulty(1, 6, value), nproc=2)
    text = str(caught.value)
    assert f"step 3: not finite: loss {value} on rank 1 for samples " in text
    assert "RunError" in text
    assert steps(read_metrics(tmp_path / "run"), "step") == [1, 2]


def test_skip_leaves_the_step_out_on_every_rank(tmp_path):
    path = recipe(tmp_path)
    settings = ["--training.nonfinite=skip", "--lr_scheduler={name: cosine, warmup_steps: 4}"]
    rows = train(path, faulty(1, 6), *settings, nproc=2)
    assert [row.get("skipped") for row in rows] == [None, None, "not finite", None, None, None]
    assert steps(rows)[2] is None
    assert steps(rows, "grad_norm")[2] is None
    assert steps(rows, "tokens")[2] == 0
    assert steps(rows, "skipped_steps") == [0, 0, 1, 1, 1, 1]
    # The schedule stands still: step 4 uses the learning rate that step 3 would have used.
    assert steps(rows, "lr")[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.0075])
    assert all(loss is not None for loss in steps(rows)[3:])


def test_a_skipped_step_changes_no_weight_or_moment(tmp_path):
    """Skipping step 1 and going on equals a run whose data starts at step 2."""
    path = recipe(tmp_path)
    settings = ["--training.nonfinite=skip", "--dataset.num_rows=8", "--training.train_iters=3"]
    skipped = train(path, faulty(0, 1), *settings, out=tmp_path / "skipped")
    silent_rows = train(path, *settings, out=tmp_path / "plain")
    assert steps(skipped)[0] is None
    # Untouched weights: the second batch costs what it costs a model that has only been initialised.
    fresh = train(path, *settings, "--optimizer={name: sgd, lr: 1e-30}", out=tmp_path / "fresh")
    assert steps(skipped)[1] == pytest.approx(steps(fresh)[1], abs=1e-6)
    assert steps(skipped)[1] != pytest.approx(steps(silent_rows)[1], abs=1e-4)


def test_skipping_has_a_limit(tmp_path):
    path = recipe(tmp_path)
    settings = ["--training.nonfinite=skip", "--training.nonfinite_limit=2"]
    with pytest.raises(RankError, match=r"step 4: not finite: .* more than training.nonfinite_limit=2 in a row"):
        train(path, faulty(0, 3, times=100), *settings, nproc=2)
    rows = read_metrics(tmp_path / "run")
    assert [row.get("skipped") for row in rows] == [None, "not finite", "not finite"]


def test_steps_without_targets_move_nothing(tmp_path):
    path = recipe(tmp_path)
    settings = [
        "--dataset.num_rows=8",
        "--training.train_iters=4",
        "--training.micro_batch_size=2",
        "--lr_scheduler={name: cosine, warmup_steps: 4}",
    ]
    plain = train(path, *settings, out=tmp_path / "plain")
    # Both steps of the first epoch hold all eight rows; silence the rows of the second step.
    from hp_core.data.order import GlobalOrder, Position
    from tests.e2e.parts import numbered_rows

    for nproc in (1, 2):
        silent = sorted(
            int(row)
            for row in GlobalOrder(
                8, fingerprint=numbered_rows(8).train.fingerprint, seed=3, rows_per_step=4
            ).step_rows(Position(4, 0, 4))
        )
        out = tmp_path / str(nproc)
        rows = train(path, *settings, f"--dataset.silent={silent}", nproc=nproc, out=out)
        quiet = [index for index, row in enumerate(rows) if row.get("skipped") == "no tokens"]
        assert steps(rows, "tokens") == [
            0 if index in quiet else tokens for index, tokens in enumerate(steps(rows, "tokens"))
        ]
        assert steps(rows, "skipped_steps")[-1] == len(quiet)
        updates = [index for index in range(4) if index not in quiet]
        assert [steps(rows, "lr")[index] for index in updates] == steps(plain, "lr")[: len(updates)]


def test_one_whole_step_without_targets(tmp_path):
    path = recipe(tmp_path)
    settings = ["--training.global_batch_size=6", "--dataset.num_rows=6", "--training.train_iters=2"]
    rows = train(path, *settings, "--dataset.silent=[0, 1, 2, 3, 4, 5]", nproc=2)
    assert [row["skipped"] for row in rows] == ["no tokens", "no tokens"]
    assert steps(rows) == [None, None]
    assert steps(rows, "skipped_steps") == [1, 2]


def test_five_micro_batches_with_accumulation_four_make_two_steps(tmp_path):
    path = recipe(tmp_path)
    settings = ["--dataset.num_rows=5", "--training={train_epochs: 1, global_batch_size: 4, seed: 3}"]
    rows = train(path, *settings)
    assert steps(rows, "samples") == [4, 5]
    assert (tmp_path / "run" / "checkpoints" / "step_00000002").is_dir()
    # The second step is normalised by its own tokens: it is the mean loss of the one row that is left.
    two = train(path, *settings, nproc=2, out=tmp_path / "two")
    assert steps(two) == pytest.approx(steps(rows), abs=1e-5)
    assert steps(two, "tokens") == steps(rows, "tokens")


@pytest.mark.parametrize(
    ("nproc", "rows", "batch", "micro", "parts"),
    [
        (
            2,
            3,
            4,
            1,
            ["3 rows (samples)", "2 data ranks", "micro_batch_size 1", "2 accumulated", "global_batch_size 2"],
        ),
        (1, 3, 4, 1, ["3 rows (samples)", "1 data rank", "4 accumulated"]),
        (2, 24, 3, 1, ["3 rows can't be cut", "on 2 ranks", "use a multiple of 2: 2 or 4"]),
    ],
)
def test_a_batch_that_cannot_be_filled_is_refused_with_what_would_work(tmp_path, nproc, rows, batch, micro, parts):
    path = recipe(tmp_path)
    settings = [f"--dataset.num_rows={rows}", f"--training.global_batch_size={batch}"]
    with pytest.raises(RankError) as caught:
        train(path, *settings, f"--training.micro_batch_size={micro}", nproc=nproc)
    for part in parts:
        assert part in str(caught.value)
    assert "InputError" in str(caught.value)


def test_evaluation_without_a_validation_set_is_refused(tmp_path):
    path = recipe(tmp_path)
    for asked in ("--evaluation.every=2", "--evaluation.at_end=true"):
        done = hp_train_here(str(path), asked)
        assert done.returncode == 2
        assert "the dataset has no validation split" in done.stderr
        assert "Traceback" not in done.stderr
    assert hp_train_here(str(path), "--training.train_iters=1").returncode == 0


def test_evaluation_leaves_training_untouched(tmp_path):
    path = recipe(tmp_path)
    settings = ["--model.config.attention_dropout=0.2", "--dataset.validation_rows=5"]
    without = train(path, *settings, "--evaluation.at_end=false", out=tmp_path / "without")
    often = train(path, *settings, "--evaluation.every=1", out=tmp_path / "often")
    assert steps(often) == steps(without)
    evaluations = [row for row in often if "eval_loss" in row]
    assert [row["step"] for row in evaluations] == [1, 2, 3, 4, 5, 6]


def test_an_error_of_one_rank_ends_all_and_is_told_once(tmp_path):
    path = recipe(tmp_path)
    done = hp_train(str(path), "--loss_fn={_target_: tests.e2e.parts.RaisingLoss, rank: 1, call: 3}", "--nproc", "2")
    assert done.returncode == 1
    assert done.stderr.count("RuntimeError: the loss broke") == 1
    assert "rank 1" in done.stderr
    assert "Connection" not in done.stderr


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("init", "can't be built: KeyError: 'no\\nway in init'"),
        ("bind", "BrokenLoss can't be bound to the model: KeyError"),
        ("forward", "BrokenLoss can't be called on a tiny batch: KeyError"),
    ],
)
def test_a_loss_that_breaks_before_the_first_step_is_told_in_a_line(tmp_path, where, message):
    loss = f"--loss_fn={{_target_: tests.e2e.parts.BrokenLoss, where: {where}}}"
    done = hp_train_here(str(recipe(tmp_path)), loss, "--trainer=text")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert message in line
    assert "; raised in parts.py, line " in line


def test_a_step_that_teaches_nothing_is_told(tmp_path):
    done = hp_train_here(str(recipe(tmp_path)), "--loss_fn={_target_: tests.e2e.parts.ZeroLoss}")
    assert done.returncode == 0
    assert "step 1: every gradient is 0, so nothing is learnt from it" in done.stdout
