"""What a loss declares is kept however a step is cut: weights, rows, ignored labels and diagnostics, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import recipe, steps, train

LAYOUTS = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)]
EOS = 256

# Sixteen tokens with EOS, four rows of four: |a b c E|d e E f|g h i j|E k l E|, with the targets of each row.
DOCUMENTS = [("abc", 0.5), ("de", 2.0), ("fghij", 3.0), ("kl", 0.0)]
ROWS = [
    [(ord("b"), 0.5), (ord("c"), 0.5), (EOS, 0.5)],
    [(ord("e"), 2.0), (EOS, 2.0), (ord("g"), 3.0)],
    [(ord("h"), 3.0), (ord("i"), 3.0), (ord("j"), 3.0), (EOS, 3.0)],
    [(ord("l"), 0.0), (EOS, 0.0)],
]
TARGETS = [target for row in ROWS for target in row]
MEAN = sum(label for label, _ in TARGETS) / len(TARGETS)
WEIGHED = sum(label * weight for label, weight in TARGETS) / sum(weight for _, weight in TARGETS)
BY_ROW = sum(sum(label for label, _ in row) / len(row) for row in ROWS) / len(ROWS)
WITHOUT_EOS = [label for label, _ in TARGETS if label != EOS]


def run(
    tmp_path: Path, layout: tuple[int, int], columns: str = "[]", *options: str, **loss: Any
) -> list[dict[str, Any]]:
    nproc, micro_batch_size = layout
    files = tmp_path / "train.jsonl"
    files.write_text("".join(json.dumps({"text": text, "w": weight}) + "\n" for text, weight in DOCUMENTS))
    text = {"name": "text", "files": str(files), "max_seq_len": 4, "tokenizer": "bytes"}
    return train(
        recipe(tmp_path),
        "--model.config.vocab_size=300",
        f"--dataset={json.dumps({**text, 'cache_dir': str(tmp_path / 'cache')})}",
        f"--dataset.columns={columns}",
        f"--loss_fn={json.dumps({'_target_': 'tests.e2e.declaring.Declaring', **loss})}",
        "--training.train_iters=1",
        f"--training.micro_batch_size={micro_batch_size}",
        *options,
        nproc=nproc,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weighted_tokens_are_divided_by_the_weights_of_the_step(tmp_path, layout, reduction):
    (row,) = run(tmp_path, layout, "[w]", reduction=reduction, weight_column="w")
    assert row["loss"] == pytest.approx(WEIGHED, rel=1e-6)
    assert row["tokens"] == len(TARGETS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_averaged_over_the_rows(tmp_path, layout):
    (row,) = run(tmp_path, layout, reduction="sample")
    assert row["loss"] == pytest.approx(BY_ROW, rel=1e-6)
    assert pytest.approx(MEAN, rel=1e-3) != BY_ROW


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_ignore_index_of_its_own_is_no_target(tmp_path, layout):
    (row,) = run(tmp_path, layout, ignore_index=EOS)
    assert row["loss"] == pytest.approx(sum(WITHOUT_EOS) / len(WITHOUT_EOS), rel=1e-6)
    assert row["tokens"] == len(WITHOUT_EOS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_diagnostics_are_logged_beside_the_loss(tmp_path, layout):
    (row,) = run(tmp_path, layout, diagnostics=["twice"])
    assert row["loss"] == row["label_loss"] == pytest.approx(MEAN, rel=1e-6)
    assert row["twice"] == pytest.approx(2 * MEAN, rel=1e-6)


@pytest.mark.parametrize("layout", [(1, 1), (1, 4), (2, 1)])
def test_evaluation_counts_as_training_does(tmp_path, layout):
    options = (f"--dataset.validation_files={tmp_path / 'train.jsonl'}",)
    rows = run(tmp_path, layout, "[w]", *options, weight_column="w", diagnostics=["twice"])
    evaluation = rows[-1]
    assert evaluation["eval_loss"] == pytest.approx(WEIGHED, rel=1e-6)
    assert evaluation["eval_twice"] == pytest.approx(2 * WEIGHED, rel=1e-6)
    assert evaluation["eval_tokens"] == len(TARGETS)
    (first,) = steps(rows)
    assert first == pytest.approx(WEIGHED, rel=1e-6)
