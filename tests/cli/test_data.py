"""`hp-train data`, on real files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hp_core.cli.main import main

RECIPE = """\
model: {name: causal_lm, pretrained: /no/such/model}
dataset:
  name: text
  files: data.jsonl
  max_seq_len: 8
  packing: none
  length_policy: truncate
  tokenizer: bytes
optimizer: {name: sgd, lr: 0.1}
training: {train_iters: 1, global_batch_size: 1, micro_batch_size: 1}
"""
TEXTS = ["ab", "", "cd", "ab", "a longer text", "ab"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HP_CACHE_DIR", str(tmp_path / "cache"))
    Path("recipe.yaml").write_text(RECIPE, encoding="utf-8")
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    Path("data.jsonl").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def _json(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["data", "recipe.yaml", "--json", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_counts_by_hand_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys)
    (train,) = found["splits"]
    report = train["report"]
    # Four texts of two bytes and the end; thirteen bytes and the end, of which eight are kept.
    assert (train["rows"], report["tokens"], report["targets"]) == (5, 4 * 3 + 8, 4 * 2 + 7)
    assert (report["empty_documents"], report["cut_documents"], report["cut_tokens"]) == (1, 1, 14 - 8)
    assert report["fill"] == 20 / 40
    assert found["num_documents"] == 6
    assert found["lengths"] == [
        {"from": 2, "to": 3, "documents": 4},
        {"from": 4, "to": 7, "documents": 0},
        {"from": 8, "to": 8, "documents": 0},
        {"from": 9, "to": 14, "documents": 1},
    ]
    assert found["num_duplicates"] == 2
    assert found["duplicates"] == [
        {"first": "data.jsonl:1", "repeated": "data.jsonl:4"},
        {"first": "data.jsonl:1", "repeated": "data.jsonl:6"},
    ]


def test_samples_are_the_rows_that_a_run_reads_first(capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, "--rows=5", "--training.seed=3")
    order = [row["row"] for row in found["rows"]]
    other = [row["row"] for row in _json(capsys, "--rows=5", "--training.seed=4")["rows"]]
    assert sorted(order) == sorted(other) == [0, 1, 2, 3, 4]
    assert order != other
    (cut,) = (row for row in found["rows"] if row["padding"] == 0)
    assert cut["documents"] == [
        {
            "location": "data.jsonl:5",
            "segments": [
                {"text": "a", "tokens": 1, "trained": False},
                {"text": " longer", "tokens": 7, "trained": True},
            ],
            "tokens": 8,
            "trained_tokens": 7,
        }
    ]


def test_text_marks_targets_where_there_are_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "recipe.yaml", "--dataset.packing=best_fit", "--rows=3"]) == 0
    out = capsys.readouterr().out
    assert "a⟦ longer⟧" in out
    assert "--- data.jsonl:1: 3 tokens, 2 targets\na⟦b<|endoftext|>⟧" in out
    assert "2 repeated documents of 6" in out
    assert "cut: 1 documents by 6 tokens" in out


def test_a_terminal_is_not_told_what_to_do_by_data(capsys: pytest.CaptureFixture[str]) -> None:
    Path("data.jsonl").write_text(json.dumps({"text": "a\x1b[2Jb"}) + "\n", encoding="utf-8")
    assert main(["data", "recipe.yaml"]) == 0
    assert "a⟦\\x1b[2Jb<|endoftext|>⟧" in capsys.readouterr().out


def test_validation_rows(capsys: pytest.CaptureFixture[str]) -> None:
    Path("held.jsonl").write_text('{"text": "xyz"}\n{"text": "cd"}\n', encoding="utf-8")
    found = _json(capsys, "--dataset.validation_files=held.jsonl", "--split=validation")
    assert [split["name"] for split in found["splits"]] == ["train", "validation"]
    assert found["rows"][0]["documents"][0]["location"] == "held.jsonl:1"
    assert found["num_documents"] == len(TEXTS) + 2
    assert found["duplicates"][-1] == {"first": "data.jsonl:3", "repeated": "held.jsonl:2"}


def test_of_a_stream_the_first_documents_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "recipe.yaml", "--dataset.streaming=true", "--dataset.block_documents=3", "--rows=9"]) == 0
    out = capsys.readouterr().out
    assert "train (the first documents of the stream): 2 rows of 8 tokens" in out
    assert out.index("--- document 1 of the stream: 3 tokens") < out.index("--- document 3 of the stream: 3 tokens")


def test_sources_have_counts_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.jsonl").write_text('{"text": "xyz"}\n{"text": "uvw"}\n', encoding="utf-8")
    sources = "{a: {files: data.jsonl, weight: 1}, b: {files: other.jsonl, weight: 1}}"
    found = _json(capsys, "--dataset.files=null", f"--dataset.sources={sources}", "--rows=100")
    (train,) = found["splits"]
    assert [(one["name"], one["report"]["rows"], one["epoch_rows"]) for one in train["sources"]] == [
        ("a", 5, 4),
        ("b", 2, 3),
    ]
    assert [one["report"]["targets"] for one in train["sources"]] == [4 * 2 + 7, 2 * 3]
    shown = [document["location"].partition(":")[0] for row in found["rows"] for document in row["documents"]]
    assert sorted(shown) == ["data.jsonl"] * 4 + ["other.jsonl"] * 3


def test_a_split_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "recipe.yaml", "--split=validation"]) == 2
    assert capsys.readouterr().err == ("--split=validation: the recipe has no validation data; its splits: train\n")


def test_faulty_data_is_told_as_by_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    with Path("data.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": 5}\n')
    assert main(["data", "recipe.yaml"]) == 2
    assert "data.jsonl:7: " in capsys.readouterr().err


def test_a_wrong_number_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "recipe.yaml", "--rows=-1"]) == 2
    assert "'-1' is not a whole number from 0" in capsys.readouterr().err
