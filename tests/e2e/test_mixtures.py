"""Runs on several named sources: the same rows for any ranks and stops, and exact counts of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import hp_train_here, manifest, recipe, steps, train

NAMES = ("rows/web", "targets/web", "rows/books", "targets/books")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """8 rows of `web` and 4 of `books`, whose rows have 5 targets: an epoch takes 4 and 8 of them."""
    for name, numbers, width in (("web", range(8), 7), ("books", range(4), 5)):
        lines = [json.dumps({"text": f"{number:0{width}d}"}) + "\n" for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    path = recipe(tmp_path)
    sources = "".join(
        f"    {name}: {{files: {tmp_path}/{name}.jsonl, weight: {weight}}}\n"
        for name, weight in (("web", 1), ("books", 2))
    )
    text = path.read_text().replace("vocab_size: 96", "vocab_size: 300")
    own = f"  name: text\n  tokenizer: bytes\n  max_seq_len: 8\n  packing: none\n  sources:\n{sources}"
    path.write_text(text.replace("  _target_: tests.e2e.parts.numbered_rows\n", own))
    return path


EPOCHS = "--training={train_epochs: 2, global_batch_size: 4, seed: 3}"


def counts(rows: list[dict[str, Any]]) -> list[list[int]]:
    return [[row[name] for name in NAMES] for row in rows]


def test_counts_are_those_of_the_epochs(path: Path, tmp_path: Path) -> None:
    rows = train(path, EPOCHS)
    assert len(rows) == 6
    # Cumulative: each epoch takes 4 rows of 7 targets and 8 rows of 5.
    assert counts(rows)[2] == [4, 28, 8, 40]
    assert counts(rows)[5] == [8, 56, 16, 80]
    for row in rows:
        assert row["rows/web"] + row["rows/books"] == row["samples"]
        assert row["targets/web"] + row["targets/books"] == row["total_tokens"]
    told = manifest(tmp_path / "run")["data"]["train"]["sources"]
    assert {name: (one["rows"], one["epoch_rows"]) for name, one in told.items()} == {"web": (8, 4), "books": (4, 8)}


def test_ranks_and_stops_change_nothing(path: Path, tmp_path: Path) -> None:
    unbroken = train(path, EPOCHS, out=tmp_path / "unbroken")
    two = train(path, EPOCHS, nproc=2, out=tmp_path / "two")
    assert counts(two) == counts(unbroken)
    assert steps(two) == pytest.approx(steps(unbroken), abs=1e-5)
    out = tmp_path / "broken"
    for stop_after in (1, 2, 4, 6):
        resume = [] if stop_after == 1 else ["--checkpoint.resume=latest"]
        broken = train(path, EPOCHS, f"--training.stop_after={stop_after}", *resume, out=out)
    assert counts(broken) == counts(unbroken)
    assert steps(broken) == steps(unbroken)


def test_other_weights_are_other_data(path: Path, tmp_path: Path) -> None:
    assert hp_train_here(str(path), EPOCHS, "--training.stop_after=1").returncode == 0
    again = ("--checkpoint.resume=latest", "--dataset.sources.web.weight=5")
    done = hp_train_here(str(path), EPOCHS, *again)
    assert done.returncode == 2
    assert "the training data is not what the run was trained on" in done.stderr


def test_a_skipped_step_has_rows_and_no_targets(path: Path, tmp_path: Path) -> None:
    loss = "--loss_fn={_target_: tests.e2e.parts.FaultyLoss, rank: 0, call: 5}"
    rows = train(path, EPOCHS, loss, "--training.nonfinite=skip")
    assert [row["rows/web"] + row["rows/books"] for row in rows] == steps(rows, "samples") == [4, 8, 12, 16, 20, 24]
    assert [row["targets/web"] + row["targets/books"] for row in rows] == steps(rows, "total_tokens")
    assert counts(rows)[1][1::2] == counts(rows)[0][1::2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("--dataset.sources.web.wieght=1", "dataset.sources.web.wieght: unknown key; did you mean 'weight'?"),
        ("--dataset.sources.web.weight=-1", "dataset.sources.web.weight: "),
        ("--dataset.sources.web.loss_weight=0", "dataset.sources.web.loss_weight: "),
        ("--dataset.sources.web.files=none.jsonl", "dataset.sources.web.files: there is no file or directory"),
        ("--dataset.temperature=2", "dataset.temperature: the source 'web' has a weight"),
        ("--dataset.sources.web.loss_weight=2", "write loss_fn.token_weights: token_weights"),
    ],
)
def test_what_a_recipe_says_wrong_is_told_in_place(path: Path, change: str, said: str) -> None:
    done = hp_train_here(str(path), EPOCHS, change)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_weights_of_a_source_weigh_its_targets(path: Path, tmp_path: Path) -> None:
    """One weight for all is no weight; twice the weight of one source moves the loss towards that source's."""
    # One step over all rows there are, because other weights are other data and so another order.
    whole = (
        "--training={train_iters: 1, global_batch_size: 12, seed: 3}",
        "--dataset.sources.web.weight=2",
        "--dataset.sources.books.weight=1",
    )
    loss = "--loss_fn={name: causal_lm, token_weights: token_weights}"

    def first(*overrides: str, out: str) -> float:
        (row,) = train(path, *whole, *overrides, out=tmp_path / out)
        return float(row["loss"])

    plain = first("--loss_fn=causal_lm", out="plain")
    even = ("--dataset.sources.web.loss_weight=3", "--dataset.sources.books.loss_weight=3")
    assert first(loss, *even, out="even") == pytest.approx(plain, abs=1e-5)
    assert abs(first(loss, even[0], out="odd") - plain) > 1e-3
