"""Columns that are missing, misspelt, dropped or not asked for: said before the first step, alike on every rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hp_core.testing.ranks import RankError
from tests.e2e.runs import hp_train_here, manifest, recipe, steps, train

LOSS = "--loss_fn={_target_: tests.e2e.weighted.WeighedLabels}"
TAKES_NONE = "--loss_fn=causal_lm"

PLUGIN = """\
from hp_core import hookimpl


@hookimpl(wrapper=True)
def prepare_model_inputs(loss_inputs):
    inputs = yield
    assert loss_inputs["weights"].shape == loss_inputs["labels"].shape
    return inputs
"""

WRAPPER = """\
import torch
from hp_core import hookimpl


class Halved(torch.nn.Module):
    reduction = "sum"
    columns = COLUMNS

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, *, model_output, labels, **columns):
        return self.loss(model_output=model_output, labels=labels, **columns) / 2


@hookimpl(wrapper=True)
def build_loss():
    return Halved((yield))
"""


def text(tmp_path: Path, columns: str) -> tuple[str, ...]:
    files = tmp_path / "train.jsonl"
    rows = [{"text": f"text {number}", "weights": number, "scale": 2} for number in range(12)]
    files.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {"name": "text", "files": str(files), "max_seq_len": 8, "tokenizer": "bytes"}
    return (
        "--model.config.vocab_size=300",
        f"--dataset={json.dumps({**section, 'cache_dir': str(tmp_path / 'cache')})}",
        f"--dataset.columns={columns}",
        "--training.train_iters=1",
    )


def refused(path: Path, *overrides: str) -> str:
    done = hp_train_here(str(path), *overrides)
    assert done.returncode == 2, done.stdout + done.stderr
    assert not (path.parent / "run").exists()
    return done.stderr


def test_a_column_that_the_rows_lack(tmp_path: Path) -> None:
    said = refused(recipe(tmp_path), LOSS, *text(tmp_path, "null"))
    assert (
        "dataset: the training rows lack the column 'weights', which WeighedLabels takes; their columns: none; "
        "the `text` dataset brings numeric fields of its files with columns: [weights]"
    ) in said
    assert "--dataset=" in said


def test_a_column_with_another_name_is_both_missing_and_unused(tmp_path: Path) -> None:
    given = text(tmp_path, "[weight]")
    (tmp_path / "train.jsonl").write_text('{"text": "one two three four five six", "weight": 1}\n' * 3)
    said = refused(recipe(tmp_path), LOSS, *given)
    assert "lack the column 'weights', which WeighedLabels takes; their columns: weight; did you mean 'weight'?" in said
    assert (
        "WeighedLabels takes no column 'weight', which the dataset's `columns` asks for; it takes: weights; "
        "did you mean 'weights'?"
    ) in said


def test_a_column_that_the_files_lack(tmp_path: Path) -> None:
    said = refused(recipe(tmp_path), LOSS, *text(tmp_path, "[wieghts]"))
    assert "train.jsonl:1: the row has no field 'wieghts'; its fields are: text, weights, scale; did you mean" in said


def test_a_column_that_no_loss_takes(tmp_path: Path) -> None:
    said = refused(recipe(tmp_path), TAKES_NONE, *text(tmp_path, "[weights]"))
    assert (
        "dataset: CausalLMLoss takes no column 'weights', which the dataset's `columns` asks for; it takes: none; "
        "leave it out, or let the loss declare it"
    ) in said


def test_a_plugin_that_prepares_inputs_may_use_what_the_loss_does_not(tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(PLUGIN)
    given = (TAKES_NONE, *text(tmp_path, "[weights]"), "--plugins=[./look.py]")
    assert hp_train_here(str(recipe(tmp_path)), *given).returncode == 0
    assert manifest(tmp_path / "run")["data"]["train"]["columns"] == ["weights"]


def test_columns_are_in_the_first_lines_of_a_run(tmp_path: Path) -> None:
    done = hp_train_here(str(recipe(tmp_path)), LOSS, *text(tmp_path, "[weights]"))
    assert "; columns: weights\n" in done.stdout


def test_a_loss_around_a_loss_declares_for_both(tmp_path: Path) -> None:
    path, given = recipe(tmp_path), (LOSS, *text(tmp_path, "[weights]"))
    losses = []
    for name, columns in (("halved", '("weights",)'), ("forgets", "()")):
        (tmp_path / f"{name}.py").write_text(WRAPPER.replace("COLUMNS", columns))
        if columns == "()":
            assert "Halved takes no column 'weights'" in refused(path, *given, f"--plugins=[./{name}.py]")
        else:
            losses += steps(train(path, *given, f"--plugins=[./{name}.py]", out=tmp_path / name))
    losses += steps(train(path, *given, out=tmp_path / "plain"))
    assert losses[0] == pytest.approx(losses[1] / 2, rel=1e-6)


def rows(**arguments: str) -> str:
    return f"--dataset={json.dumps({'_target_': 'tests.e2e.weighted.weighted_rows', **arguments})}"


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_data_set_of_ones_own_brings_an_array(tmp_path: Path, nproc: int) -> None:
    """Row r holds (r + 2) * position + r, its weights are r + 1 and its first r labels are left out."""
    found = train(recipe(tmp_path), LOSS, rows(), "--training.train_iters=2", nproc=nproc)
    labels = [[((place + 1) * (row + 2) + row) % 96 for place in range(row, 16)] for row in range(8)]
    sums = [(row + 1) * sum(labels[row]) for row in range(8)]
    counts = [len(one) for one in labels]
    trained = sum(loss * tokens for loss, tokens in zip(steps(found), steps(found, "tokens"), strict=True))
    assert trained == pytest.approx(sum(sums), rel=1e-6)
    evaluated = {split: row[f"{split}_loss"] for row in found for split in ("eval", "test") if f"{split}_loss" in row}
    assert evaluated["eval"] == pytest.approx(sum(sums[:5]) / sum(counts[:5]), rel=1e-6)
    assert evaluated["test"] == pytest.approx(sum(sums[:3]) / sum(counts[:3]), rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kind": "none"}, "the training rows lack the column 'weights', which WeighedLabels takes"),
        ({"validation": "none"}, "the validation rows lack the column 'weights', which WeighedLabels takes"),
        (
            {"kind": "short"},
            "the column 'weights' of the training rows, which WeighedLabels takes, has the shape (15,), not that of "
            "the row, (16,)",
        ),
        ({"validation": "text"}, "of the validation rows, which WeighedLabels takes, holds <U32, not numbers"),
    ],
)
def test_arrays_of_ones_own_that_do_not_fit(tmp_path: Path, arguments: dict[str, str], said: str) -> None:
    assert said in refused(recipe(tmp_path), LOSS, rows(**arguments))


def test_arrays_that_no_loss_takes_are_the_data_sets_own_business(tmp_path: Path) -> None:
    assert len(steps(train(recipe(tmp_path), TAKES_NONE, rows(), "--training.train_iters=2"))) == 2


def test_every_rank_hears_of_a_column_that_one_of_them_lacks(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="the training rows lack the column 'weights'") as caught:
        train(recipe(tmp_path), LOSS, rows(rank_one="none"), nproc=2)
    assert "InputError" in str(caught.value)


def test_a_collator_that_drops_a_column_is_refused(tmp_path: Path) -> None:
    collator = "--dataloader.collate_fn={_target_: tests.e2e.weighted.forgetful_rows}"
    said = refused(recipe(tmp_path), LOSS, rows(), collator)
    assert "dataloader.collate_fn: the loss takes the column 'weights', which the micro-batch lacks" in said
