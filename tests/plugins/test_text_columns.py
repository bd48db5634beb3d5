"""The `text` dataset's `columns`: from every format, on both sides of a split, and refused with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hp_core.data.protocols import Datasets, RowDataset
from hp_core.errors import ArgumentError, InputError
from hp_plugins.datasets.text import text
from hp_plugins.tokenizers.bpe import bpe
from hp_plugins.tokenizers.byte_level import byte_tokenizer

ROWS = [{"text": "ab", "w": 0.5, "n": 3}, {"text": "cde", "w": 2, "n": 4}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hub")


def build(**arguments: Any) -> Datasets:
    return text(**{"max_seq_len": 8, "tokenizer": byte_tokenizer(), **arguments})


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        path.write_text("\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]) + "\n")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def weighted_labels(rows: RowDataset | None, name: str = "w", tokenizer: Any = None) -> set[tuple[str, float]]:
    """Every label but EOS with the number that stands at its position."""
    assert rows is not None
    tokenizer = tokenizer or byte_tokenizer()
    samples: list[Any] = [rows[number] for number in range(len(rows))]
    pairs = [pair for sample in samples for pair in zip(sample["labels"].tolist(), sample[name].tolist(), strict=True)]
    return {(tokenizer.decode([label]), value) for label, value in pairs if label not in (-100, tokenizer.eos_id)}


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_columns_come_from_every_format(tmp_path: Path, ending: str) -> None:
    file = write(tmp_path / f"a.{ending}", ROWS)
    train = build(files=file, columns=["n", "w"]).train
    assert weighted_labels(train) == {("b", 0.5), ("d", 2.0), ("e", 2.0)}
    assert weighted_labels(train, "n") == {("b", 3.0), ("d", 4.0), ("e", 4.0)}
    assert set(train[0]) == {"index", "input_ids", "labels", "position_ids", "is_padding", "w", "n"}
    assert set(build(files=file).train[0]) == {"index", "input_ids", "labels", "position_ids", "is_padding"}


def test_columns_come_from_the_hub(tmp_path: Path) -> None:
    (tmp_path / "hub_data").mkdir()
    write(tmp_path / "hub_data/train.jsonl", ROWS)
    for split, expected in (("train", {("b", 0.5), ("d", 2.0), ("e", 2.0)}), ("train[1:]", {("d", 2.0), ("e", 2.0)})):
        datasets = build(hub_id=str(tmp_path / "hub_data"), split=split, columns=["w"])
        assert weighted_labels(datasets.train) == expected
    with pytest.raises(InputError, match=r"row 1: the row has no field 'v'; its fields are: text, w, n"):
        build(hub_id=str(tmp_path / "hub_data"), columns=["v"])


def test_validation_rows_have_them_too(tmp_path: Path) -> None:
    rows = [{"text": chr(97 + number) * 3, "w": number + 1} for number in range(20)]
    expected = {(chr(97 + number), number + 1.0) for number in range(20)}
    file = write(tmp_path / "a.jsonl", rows)
    for tokenizer in (byte_tokenizer(), bpe(vocab_size=257, min_frequency=1000)):
        split = build(files=file, columns=["w"], validation_fraction=0.3, tokenizer=tokenizer)
        train, validation = (weighted_labels(rows, "w", split.tokenizer) for rows in (split.train, split.validation))
        assert train | validation == expected
        assert len(train) > len(validation) > 0
    other = write(tmp_path / "b.jsonl", [{"text": "xyz", "w": 7}])
    assert weighted_labels(build(files=file, columns=["w"], validation_files=other).validation) == {
        ("y", 7.0),
        ("z", 7.0),
    }
    lacking = write(tmp_path / "c.jsonl", [{"text": "xyz"}])
    with pytest.raises(InputError, match=r"c\.jsonl:1: the row has no field 'w'"):
        build(files=file, columns=["w"], validation_files=lacking)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("null", "column 'w' is null"),
        ("[1, 2]", "column 'w' is a list; it must be one number for the whole document"),
        ("true", "column 'w' is True of type bool, not a number"),
        ("NaN", "column 'w' is nan, which is not finite"),
        ("16777217", "column 'w' is 16777217, a whole number that float32 would change"),
    ],
)
def test_what_is_no_number_is_placed_and_not_cached(tmp_path: Path, value: str, said: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "ab", "w": 1}}\n{{"text": "cd", "w": {value}}}\n')
    for _ in range(2):
        with pytest.raises(InputError, match=rf"a\.jsonl:2: {said[:8]}") as caught:
            build(files=str(file), columns=["w"])
        assert said in str(caught.value)
    assert len(build(files=str(file)).train) == 1


def test_a_text_file_has_no_columns(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab")
    with pytest.raises(InputError, match=r"a\.txt: the row has no field 'w'; its fields are: text"):
        build(files=str(tmp_path / "a.txt"), columns=["w"])


def test_a_name_with_a_meaning_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="can't be called 'labels'") as caught:
        build(files=write(tmp_path / "a.jsonl", ROWS), columns=["w", "labels"])
    assert caught.value.path == "columns[1]"


def test_other_columns_make_other_rows_and_none_keep_the_fingerprint(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", ROWS)
    fingerprints = [build(files=file, columns=columns).train.fingerprint for columns in (None, ["w"], ["n"], [])]
    assert len(set(fingerprints)) == 3
    assert fingerprints[0] == fingerprints[3]
