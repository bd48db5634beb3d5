"""Rows and their errors, the numbers by hand, and whole runs that don't depend on how a step is cut."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hp_classifier.data import labelled
from hp_classifier.loss import ClassificationLoss
from hp_classifier.trainer import ClassificationTrainer
from hp_core import ArgumentError, InputError
from hp_core.testing import trainer_checks

HERE = Path(__file__).parents[1]
RECIPE = (HERE / "recipe.yaml").read_text(encoding="utf-8").replace("examples/hp_classifier", str(HERE))
LABELS = ["no", "yes"]


@trainer_checks(ClassificationTrainer, recipe=RECIPE, skip={"documents": "a row is one text"})
def test_promises(check):
    """One test for each: any micro-batches, any ranks, empty rows, resuming, export and more."""
    check()


class Letters:
    """A token for each character."""

    eos_id, fingerprint = 0, "letters"

    def encode_batch(self, texts):
        return [[ord(letter) for letter in text] for text in texts]


def read(path: Path, rows: list, **settings):
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return labelled(files=str(path), labels=LABELS, tokenizer=Letters(), **{"max_seq_len": 4, **settings})


def test_a_row_is_a_text_and_its_label(tmp_path):
    datasets = read(tmp_path / "a.jsonl", [{"text": "abc", "label": "yes"}, {"text": "d", "label": "no"}])
    row = datasets.train[0]
    assert row["input_ids"].tolist() == [97, 98, 99, 0]
    assert row["is_padding"].tolist() == [False, False, False, True]
    assert row["labels"].tolist() == [1]
    assert datasets.train[1]["labels"].tolist() == [0]
    assert datasets.validation is None


def test_a_line_ends_where_a_json_line_does(tmp_path):
    row = {"text": "a\u2028b", "label": "yes"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    settings = {"labels": LABELS, "tokenizer": Letters(), "max_seq_len": 4}
    assert len(labelled(files=str(tmp_path / "a.jsonl"), **settings).train) == 1


def test_faulty_rows_are_told_all_at_once_with_their_lines(tmp_path):
    rows = [
        {"text": "a", "label": "yes"},
        {"text": "b", "label": "maybe"},
        "{",
        {"text": "", "label": "no"},
        {"text": "c"},
    ]
    with pytest.raises(InputError) as caught:
        read(tmp_path / "a.jsonl", rows)
    text = str(caught.value)
    for line, told in ((2, "the label 'maybe' is none of no, yes"), (3, "Expecting"), (4, "empty"), (5, "expected {")):
        assert f"a.jsonl:{line}: " in text
        assert told in text


def test_a_text_that_is_too_long_is_an_error_unless_it_may_be_cut(tmp_path):
    rows = [{"text": "abcdef", "label": "yes"}]
    with pytest.raises(ArgumentError, match="1 of 1 texts are longer than 4 tokens, the longest has 6"):
        read(tmp_path / "a.jsonl", rows)
    datasets = read(tmp_path / "a.jsonl", rows, too_long="cut")
    assert datasets.train[0]["input_ids"].tolist() == [97, 98, 99, 100]


def test_the_same_text_is_never_in_both_parts(tmp_path):
    rows = [{"text": str(number), "label": "no"} for number in range(200)] * 2
    datasets = read(tmp_path / "a.jsonl", rows, validation_fraction=0.25)
    parts = [{tuple(part[i]["input_ids"]) for i in range(len(part))} for part in (datasets.train, datasets.validation)]
    assert not parts[0] & parts[1]
    assert len(parts[0] | parts[1]) == 200
    assert 30 < len(parts[1]) < 70


def test_loss_and_accuracy_by_hand():
    logits = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)], [5.0, 0.0]])
    labels = torch.tensor([[1], [0], [-100]])
    found = ClassificationLoss()(model_output=SimpleNamespace(logits=logits), labels=labels)
    # Probabilities 3/4 and 1/4 of the right labels; the third row is no text.
    assert float(found["loss"]) == pytest.approx(-math.log(3 / 4) - math.log(1 / 4))
    assert float(found["accuracy"]) == 1


SHORT = (
    "training.train_epochs=null",
    "training.train_iters=4",
    "training.log_every=1",
    "training.global_batch_size=12",
)


def test_numbers_do_not_depend_on_ranks_or_accumulation(hp_run):
    runs = [
        hp_run(RECIPE, *SHORT, "training.micro_batch_size=12"),
        hp_run(RECIPE, *SHORT, "training.micro_batch_size=3"),
        hp_run(RECIPE, *SHORT, "training.micro_batch_size=2", nproc=2),
    ]
    for run in runs[1:]:
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-5)
        assert run.rows[-1]["eval_loss"] == pytest.approx(runs[0].rows[-1]["eval_loss"], rel=1e-5)
        assert run.rows[-1]["eval_accuracy"] == runs[0].rows[-1]["eval_accuracy"]
        assert run.rows[0]["tokens"] == 12


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "loss_fn=causal_lm",
            "loss_fn: CausalLMLoss is not a loss of one label for each text; write loss_fn: hp-class",
        ),
        ("trainer=text", "dataset: its rows have 64 tokens and 1 label, not one for each; name the trainer"),
        ("loss_fn=null", "loss_fn: ModelOutputLoss is not a loss of one label for each text"),
        ("dataset.labels=[praise, complaint]", "the label 'question' is none of praise, complaint"),
        ("model.labels=[praise, question, complaint]", "the model praise, question, complaint"),
        ("dataset.tokenizer=null", "tokenizer"),
        ("model.config.model_type=mamba", "'mamba' is no sequence classifier of the installed transformers"),
        ("model.config.num_layers=2", "config.num_layers: unknown key: Qwen3Config has none like it"),
        ("model.config.pad_token_id=null", "config.pad_token_id: is missing"),
        ("dataset.max_seq_len=8", "write max_seq_len: "),
        ("dataloader.collate_fn=rows", "dataloader.collate_fn: a classifier's rows"),
        ("evaluation.samples.prompts=[hello]", "evaluation.samples.prompts: a classifier writes no text"),
    ],
)
def test_what_does_not_fit_is_refused(hp_run, override, told):
    with pytest.raises(InputError, match=told):
        hp_run(RECIPE, *SHORT, "training.micro_batch_size=12", override)
