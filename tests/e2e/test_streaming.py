"""Streamed data in whole runs: the same rows after a stop or a kill, on the same data ranks only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hp_core.observe.trackers import read_metrics
from hp_core.testing.ranks import RankError
from tests.e2e.runs import hp_train_here, manifest, recipe, steps, train

SETTINGS = ("--training={train_iters: 7, global_batch_size: 4, seed: 3}",)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Documents of several lengths in two files: two ranks take a bit more than one epoch in seven steps."""
    for number in range(2):
        lines = [json.dumps({"text": f"{one:03d}" * (1 + one % 7)}) + "\n" for one in range(number, 23, 2)]
        (tmp_path / f"{number}.jsonl").write_text("".join(lines))
    path = recipe(tmp_path)
    text = path.read_text().replace("vocab_size: 96", "vocab_size: 300")
    own = (
        "  name: text\n  tokenizer: bytes\n  max_seq_len: 16\n  streaming: true\n  block_documents: 5\n"
        f"  packing: best_fit\n  files: {tmp_path}/?.jsonl\n"
    )
    path.write_text(text.replace("  _target_: tests.e2e.parts.numbered_rows\n", own))
    return path


@pytest.mark.parametrize(("nproc", "stops"), [(1, (3, 7)), (2, (1, 2, 3, 4, 5, 6, 7))])
def test_a_stopped_run_equals_the_unbroken_one_bit_for_bit(
    path: Path, tmp_path: Path, nproc: int, stops: tuple[int, ...]
) -> None:
    unbroken = train(path, *SETTINGS, nproc=nproc, out=tmp_path / "unbroken")
    out = tmp_path / "broken"
    for step in stops:
        resume = [] if step == stops[0] else ["--checkpoint.resume=latest"]
        workers = f"--dataloader.num_workers={2 if step == 4 else 0}"
        rows = train(path, *SETTINGS, f"--training.stop_after={step}", workers, *resume, nproc=nproc, out=out)
    for name in ("loss", "grad_norm", "tokens", "total_tokens", "samples", "epoch"):
        assert steps(rows, name) == steps(unbroken, name), name
    assert steps(rows, "epoch")[-1] == 1
    assert steps(rows, "samples") == [4, 8, 12, 16, 20, 24, 28]


def test_a_killed_run_continues_where_its_last_checkpoint_stands(path: Path, tmp_path: Path) -> None:
    unbroken = train(path, *SETTINGS, nproc=2, out=tmp_path / "unbroken")
    out = tmp_path / "killed"
    deadly = "--loss_fn={_target_: tests.e2e.parts.DeadlyLoss, rank: 1, call: CALL}"
    with pytest.raises(RankError):
        train(path, *SETTINGS, "--checkpoint.save_every=2", deadly.replace("CALL", "11"), nproc=2, out=out)
    assert steps(read_metrics(out), "step") == [1, 2, 3, 4, 5]
    again = ("--checkpoint.save_every=2", "--checkpoint.resume=latest", deadly.replace("CALL", "1000"))
    rows = train(path, *SETTINGS, *again, nproc=2, out=out)
    assert steps(rows) == steps(unbroken)


def test_another_number_of_data_ranks_is_refused_and_of_rows_in_a_micro_batch_is_not(
    path: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    unbroken = train(path, *SETTINGS, nproc=2, out=tmp_path / "unbroken")
    train(path, *SETTINGS, "--training.stop_after=3", nproc=2, out=out)
    again = "--checkpoint.resume=latest"
    with pytest.raises(RankError, match=r"was dealt to 2 data ranks, and this run has 1: .* resume with 2 data ranks"):
        train(path, *SETTINGS, again, nproc=1, out=out)
    with pytest.raises(RankError, match="the training data is not what the run was trained on"):
        train(path, *SETTINGS, again, "--dataset.block_documents=6", nproc=2, out=out)
    rows = train(path, *SETTINGS, again, "--training.micro_batch_size=2", nproc=2, out=out)
    assert steps(rows, "tokens") == steps(unbroken, "tokens")
    assert steps(rows) == pytest.approx(steps(unbroken), abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("--training={train_epochs: 1, global_batch_size: 4}",), "training.train_epochs: the length of streamed data"),
        (("--training={train_samples: 8, global_batch_size: 4}",), "training.train_samples: the length of streamed"),
        (("--dataset.validation_fraction=0.1",), "dataset.validation_fraction: none of streamed data can be held out"),
        (("--dataset.streaming=false",), "dataset.block_documents: has no effect without streaming"),
        (("--dataset.megatron=x",), "dataset.megatron: can't be streamed"),
        (("--dataset.tokenizer={name: bpe, vocab_size: 280}",), "dataset.tokenizer: a tokenizer can't be learned from"),
        (("--dataset.field=body",), "0.jsonl:1: the row has no field 'body'"),
    ],
)
def test_what_can_not_be_streamed_is_refused(path: Path, changes: tuple[str, ...], said: str) -> None:
    done = hp_train_here(str(path), *changes)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_stream_is_evaluated_on_files_of_its_own(path: Path, tmp_path: Path) -> None:
    changes = (f"--dataset.validation_files={tmp_path}/1.jsonl", "--training.train_iters=1")
    (row, evaluation) = train(path, *SETTINGS, *changes)
    assert row["step"] == evaluation["step"] == 1
    told = manifest(tmp_path / "run")["streamed"]
    assert (told["documents"], told["split_documents"]) == (5, 1)
    # Every byte but a document's first, and its end.
    assert evaluation["eval_tokens"] == sum(3 * (1 + one % 7) for one in range(1, 23, 2))
