"""A loss that takes columns: the numbers of a file reach the labels they belong to, however the batch is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import recipe, steps, train

LAYOUTS = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)]
EOS = 256

# Sixteen tokens with EOS, four rows of four: |a b c E|d e E f|g h i j|E k l E|. Two documents are cut or packed.
DOCUMENTS = [("abc", 0.5, 1), ("de", 2, 10), ("fghij", 3, 100), ("kl", -1, 1000)]
TARGETS = 3 + 2 + 5 + 2
WEIGHED = (
    0.5 * (ord("b") + ord("c") + EOS)
    + 2 * (ord("e") + EOS)
    + 3 * (ord("g") + ord("h") + ord("i") + ord("j") + EOS)
    - (ord("l") + EOS)
)


def write(path: Path, documents: list[tuple[str, float, int]]) -> Path:
    rows = [{"text": text, "weights": weights, "scale": scale} for text, weights, scale in documents]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(tmp_path: Path, columns: str, loss: str, *, train_iters: int = 1, **dataset: Any) -> tuple[str, ...]:
    files = write(tmp_path / "train.jsonl", DOCUMENTS)
    text = {"name": "text", "files": str(files), "max_seq_len": 4, "tokenizer": "bytes", **dataset}
    return (
        "--model.config.vocab_size=300",
        f"--dataset={json.dumps({**text, 'cache_dir': str(tmp_path / 'cache')})}",
        f"--dataset.columns={columns}",
        f"--loss_fn={loss}",
        f"--training.train_iters={train_iters}",
    )


@pytest.mark.parametrize(("nproc", "micro_batch_size"), LAYOUTS)
def test_weights_of_a_file_meet_their_labels(tmp_path: Path, nproc: int, micro_batch_size: int) -> None:
    given = arguments(tmp_path, "[weights]", "{_target_: tests.e2e.weighted.WeighedLabels}")
    rows = train(recipe(tmp_path), *given, f"--training.micro_batch_size={micro_batch_size}", nproc=nproc)
    assert steps(rows, "tokens") == [TARGETS]
    # The engine divides a sum by the step's supervised tokens.
    assert steps(rows) == pytest.approx([WEIGHED / TARGETS], rel=1e-6)


def test_a_rank_with_an_empty_row_adds_nothing(tmp_path: Path) -> None:
    """Five rows, two a step: with two ranks, one of them has the empty row in the third step."""
    files = write(tmp_path / "five.jsonl", [*DOCUMENTS, ("xyz", 5, 1)])
    loss = "{_target_: tests.e2e.weighted.Preparing}"
    given = arguments(tmp_path, "[weights]", loss, train_iters=3, files=str(files))
    for nproc in (1, 2):
        rows = train(recipe(tmp_path), *given, "--training.global_batch_size=2", nproc=nproc, out=tmp_path / str(nproc))
        assert steps(rows, "samples") == [2, 4, 5]
        total = sum(loss * tokens for loss, tokens in zip(steps(rows), steps(rows, "tokens"), strict=True))
        assert total == pytest.approx(WEIGHED + 5 * (ord("y") + ord("z") + EOS), rel=1e-6)


def test_every_column_goes_under_its_own_name(tmp_path: Path) -> None:
    loss = "{_target_: tests.e2e.weighted.TwoColumns, columns: [scale, weights]}"
    rows = train(recipe(tmp_path), *arguments(tmp_path, "[weights, scale]", loss), nproc=2)
    assert rows[0]["scale_loss"] == pytest.approx((3 * 1 + 2 * 10 + 5 * 100 + 2 * 1000) / TARGETS, rel=1e-6)
    assert rows[0]["weights_loss"] == pytest.approx((3 * 0.5 + 2 * 2 + 5 * 3 - 2) / TARGETS, rel=1e-6)


@pytest.mark.parametrize("nproc", [1, 2])
def test_evaluation_has_the_columns_of_the_validation_files(tmp_path: Path, nproc: int) -> None:
    # Eight tokens, two rows, |m n o p|E q r E|: three targets of the first document cross into the second row.
    other = write(tmp_path / "validation.jsonl", [("mnop", 4, 1), ("qr", 0.25, 1)])
    loss = "{_target_: tests.e2e.weighted.WeighedLabels}"
    given = arguments(tmp_path, "[weights]", loss, validation_files=str(other))
    rows = train(recipe(tmp_path), *given, "--training.micro_batch_size=2", nproc=nproc)
    assert rows[-1]["eval_tokens"] == 6
    expected = 4 * (ord("n") + ord("o") + ord("p") + EOS) + 0.25 * (ord("r") + EOS)
    assert rows[-1]["eval_loss"] == pytest.approx(expected / 6, rel=1e-6)


def test_a_weighted_cross_entropy_trains_alike_on_any_layout(tmp_path: Path) -> None:
    loss = "{_target_: tests.e2e.weighted.WeightedCrossEntropy}"
    common = arguments(tmp_path, "[weights]", loss, train_iters=4)
    alone = train(recipe(tmp_path), *common, "--training.micro_batch_size=4", out=tmp_path / "alone")
    for nproc, micro_batch_size in LAYOUTS[:2] + LAYOUTS[3:]:
        cut = f"--training.micro_batch_size={micro_batch_size}"
        rows = train(recipe(tmp_path), *common, cut, nproc=nproc, out=tmp_path / f"{nproc}-{micro_batch_size}")
        assert steps(rows) == pytest.approx(steps(alone), abs=1e-5)
        assert steps(rows, "grad_norm") == pytest.approx(steps(alone, "grad_norm"), rel=1e-4)


def test_equal_weights_scale_the_plain_loss(tmp_path: Path) -> None:
    """Twice the weight is twice the loss and the gradient of the first-party loss on the same rows."""
    files = write(tmp_path / "equal.jsonl", [(text, 2, 1) for text, _, _ in DOCUMENTS])
    weighted = arguments(tmp_path, "[weights]", "{_target_: tests.e2e.weighted.WeightedCrossEntropy}", files=str(files))
    plain = arguments(tmp_path, "null", "causal_lm", files=str(files))
    for nproc in (1, 2):
        (one,) = train(recipe(tmp_path), *weighted, nproc=nproc, out=tmp_path / f"weighted{nproc}")
        (two,) = train(recipe(tmp_path), *plain, nproc=nproc, out=tmp_path / f"plain{nproc}")
        assert one["loss"] == pytest.approx(2 * two["loss"], rel=1e-6)
        assert one["grad_norm"] == pytest.approx(2 * two["grad_norm"], rel=1e-5)
