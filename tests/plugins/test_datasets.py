from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hp_core.data.protocols import Datasets, RowDataset
from hp_core.data.records import Row
from hp_core.data.text import split_hash
from hp_core.errors import ArgumentError, HpError, InputError
from hp_plugins.datasets.python_docs import Include, PythonDocs, python_docs
from hp_plugins.datasets.text import text
from hp_plugins.tokenizers.bpe import bpe
from hp_plugins.tokenizers.byte_level import byte_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hub")
    return tmp_path / "cache"


def build(**arguments: Any) -> Datasets:
    return text(**{"max_seq_len": 8, "tokenizer": byte_tokenizer(), **arguments})


def documents(rows: RowDataset | None) -> list[str]:
    assert rows is not None
    ids = [token for number in range(len(rows)) for token in rows[number]["input_ids"].tolist()]
    parts = "".join(chr(token) if token < 256 else "|" for token in ids).split("|")
    return [part for part in parts if part]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_several_files_and_formats_make_one_dataset(tmp_path: Path) -> None:
    write_lines(tmp_path / "data/a.jsonl", [{"text": "one"}, {"text": ""}, {"text": "two"}])
    (tmp_path / "data/b.txt").write_text("three")
    (tmp_path / "data/c.csv").write_text("text\nfour\n")
    datasets = build(files=str(tmp_path / "data"))
    assert documents(datasets.train) == ["one", "two", "three", "four"]
    assert datasets.train.report is not None
    assert datasets.train.report.empty_documents == 1
    assert datasets.train.report.targets == sum(map(len, ("one", "two", "three", "four")))


def test_every_argument_of_text_does_something(tmp_path: Path, cache: Path) -> None:
    rows = [{"text": f"t{number}", "body": f"b{number}", "n": number} for number in range(20)]
    files = write_lines(tmp_path / "a.jsonl", rows)
    assert documents(build(files=files).train)[:2] == ["t0", "t1"]
    assert documents(build(files=files, field="body").train)[:2] == ["b0", "b1"]
    assert documents(build(files=files, template="{body}-{n}").train)[:2] == ["b0-0", "b1-1"]
    assert build(files=files, max_seq_len=32).train.max_seq_len == 32
    split = build(files=files, validation_fraction=0.3)
    assert sorted(documents(split.train) + documents(split.validation)) == sorted(f"t{number}" for number in range(20))
    other = write_lines(tmp_path / "b.jsonl", [{"text": "v"}])
    assert documents(build(files=files, validation_files=[other]).validation) == ["v"]
    assert not (tmp_path / "elsewhere").exists()
    build(files=files, cache_dir=str(tmp_path / "elsewhere"))
    assert list((tmp_path / "elsewhere").glob("*/tokens.bin"))
    assert list(cache.glob("*/tokens.bin"))


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({}, "files"),
        ({"files": "{file}", "hub_id": "a/b"}, "files"),
        ({"files": "{file}", "split": "train"}, "split"),
        ({"files": "{file}", "hub_config": "en"}, "hub_config"),
        ({"files": "{file}", "field": "text", "template": "{{text}}"}, "template"),
        ({"files": "{file}", "validation_files": ["{file}", "none.txt"]}, "validation_files[1]"),
        ({"files": "{file}", "validation_files": "{file}", "validation_fraction": 0.1}, "validation_fraction"),
        ({"files": "{file}", "validation_fraction": 1.0}, "validation_fraction"),
        ({"files": "{file}", "max_seq_len": 1}, "max_seq_len"),
        ({"files": "{file}", "tokenizer": None}, "tokenizer"),
    ],
)
def test_arguments_that_do_not_fit_are_named(tmp_path: Path, arguments: dict[str, Any], path: str) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])

    def fill(value: Any) -> Any:
        if isinstance(value, list):
            return [fill(item) for item in value]
        return value.format(file=file) if isinstance(value, str) else value

    with pytest.raises(ArgumentError) as caught:
        build(**{name: fill(value) for name, value in arguments.items()})
    assert caught.value.path == path


@pytest.mark.parametrize("learned", [False, True])
def test_a_broken_line_is_an_input_error_with_its_place_and_is_not_cached(tmp_path: Path, learned: bool) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": \n')
    for _ in range(2):
        with pytest.raises(InputError, match=r"a\.jsonl:2: not valid JSON"):
            build(files=str(path), tokenizer=bpe() if learned else byte_tokenizer())
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert documents(build(files=str(path)).train) == ["one", "two"]


def test_half_a_surrogate_pair_is_placed_whichever_tokenizer_meets_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "\\ud83d"}\n')
    for tokenizer in (byte_tokenizer(), bpe(), bpe(sample_bytes=None)):
        with pytest.raises(InputError, match=r"a\.jsonl:2: text: character 1 "):
            build(files=str(path), tokenizer=tokenizer)


def test_changed_content_of_the_same_size_is_encoded_again(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = build(files=str(path))
    path.write_text("two")
    assert documents(build(files=str(path)).train) == ["two"]
    assert documents(first.train) == ["one"]


def test_a_bpe_never_sees_validation_documents(tmp_path: Path) -> None:
    rows = [{"text": f"{chr(97 + number) * 6} " * 5} for number in range(20)]
    files = write_lines(tmp_path / "a.jsonl", rows)
    datasets = build(files=files, validation_fraction=0.2, tokenizer=bpe(vocab_size=400))
    assert datasets.tokenizer is not None
    train, validation = datasets.train.report, datasets.validation and datasets.validation.report
    assert train is not None
    assert validation
    assert train.targets / train.documents < 10
    assert validation.targets / validation.documents >= 35


def hub_directory(tmp_path: Path) -> str:
    write_lines(tmp_path / "hub_data/train.jsonl", [{"text": "one", "q": "1"}, {"text": "two", "q": "2"}])
    write_lines(tmp_path / "hub_data/test.jsonl", [{"text": "three", "q": "3"}])
    return str(tmp_path / "hub_data")


def test_a_hub_data_set_and_its_splits(tmp_path: Path) -> None:
    hub_id = hub_directory(tmp_path)
    assert documents(build(hub_id=hub_id).train) == ["one", "two"]
    assert documents(build(hub_id=hub_id, split="test").train) == ["three"]
    assert documents(build(hub_id=hub_id, split="train[1:]", template="{q}:{text}").train) == ["2:two"]
    assert documents(build(hub_id=hub_id, split="train[:1]", template="{q}:{text}").train) == ["1:one"]
    with pytest.raises(InputError, match="has no field 'body'; its fields are: text, q"):
        build(hub_id=hub_id, field="body")


@pytest.mark.parametrize("arguments", [{"hub_id": "nobody/nothing"}, {"split": "none"}, {"hub_config": "none"}])
def test_a_hub_data_set_that_can_not_be_loaded_is_one_line(tmp_path: Path, arguments: dict[str, str]) -> None:
    with pytest.raises(ArgumentError, match="can't be loaded") as caught:
        build(**{"hub_id": hub_directory(tmp_path), **arguments})
    assert caught.value.path == "hub_id"
    assert "\n" not in str(caught.value)


SOURCES = {
    "b.py": '"""Module b."""\nclass A:\n    """Class A."""\n    def f(self):\n        """Method\n        f."""\n',
    "a/__init__.py": "",
    "a/c.py": "x = '\\d'\n",
    "a/broken.py": "def\n",
    "a/latin.py": "# -*- coding: latin-1 -*-\n'''caf\xe9'''\n",
    "a/bad.py": "'''caf\xe9'''\n",
    "test/t.py": '"""A test."""',
    "a/tests/t.py": '"""A test."""',
    "site-packages/p.py": '"""A package."""',
    "notes.txt": "not Python",
}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for name, content in SOURCES.items():
        path = tmp_path / "library" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode("latin-1"))
    return tmp_path / "library"


def read(library: Path, include: Include, max_files: int | None = None) -> list[str]:
    return [row.fields["text"] for row in rows_of(PythonDocs(library, include, max_files))]


def rows_of(source: PythonDocs) -> list[Row]:
    return [row for row in source.rows(["text"]) if isinstance(row, Row)]


def test_a_docstring_is_held_out_with_its_file(library: Path) -> None:
    source = PythonDocs(library, "both")
    documents = rows_of(source)
    assert [source.locate(row.place) for row in documents] == [row.location for row in documents]
    groups: dict[str, set[str]] = {}
    for document in documents:
        groups.setdefault(document.location.partition(".py")[0], set()).add(document.group)
    assert all(len(group) == 1 and "" not in group for group in groups.values())
    assert len({group for one in groups.values() for group in one}) == len(groups)
    hashes = {split_hash(document, document.fields["text"]) for document in documents}
    assert len(hashes) == len(groups)


def test_what_of_the_library_becomes_documents(library: Path) -> None:
    latin = SOURCES["a/latin.py"]
    docstrings = ["Module b.", "Class A.", "Method\nf."]
    assert read(library, "docstrings") == ["café", *docstrings]
    assert read(library, "sources") == ["", "def\n", SOURCES["a/c.py"], latin, SOURCES["b.py"]]
    assert read(library, "both") == ["", SOURCES["a/c.py"], "café", latin, *docstrings, SOURCES["b.py"]]
    assert read(library, "docstrings", max_files=5) == ["café"]


def test_the_library_is_known_by_content_and_settings(library: Path, tmp_path: Path) -> None:
    base = PythonDocs(library, "both").fingerprint
    others = {PythonDocs(library, "sources").fingerprint, PythonDocs(library, "both", 2).fingerprint}
    moved = library.rename(tmp_path / "moved")
    assert PythonDocs(moved, "both").fingerprint == base
    (moved / "b.py").write_text("changed")
    assert len(others | {base, PythonDocs(moved, "both").fingerprint}) == 4


def test_a_python_without_sources_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no sources of its standard library"):
        PythonDocs(tmp_path, "both").fingerprint  # noqa: B018


def test_python_docs_are_real_text() -> None:
    datasets = python_docs(max_files=12, max_seq_len=64, tokenizer=bpe(vocab_size=512))
    assert datasets.tokenizer is not None
    assert datasets.validation is not None
    decoded = "".join(
        datasets.tokenizer.decode(datasets.train[number]["input_ids"].tolist()) for number in range(len(datasets.train))
    )
    assert "import" in decoded
    only = python_docs(
        max_files=12, max_seq_len=64, validation_fraction=0, include="docstrings", tokenizer=byte_tokenizer()
    )
    assert only.validation is None
    assert "import sys\n" not in "".join(documents(only.train))


def test_errors_are_the_users(tmp_path: Path) -> None:
    with pytest.raises(HpError) as caught:
        build(files=str(tmp_path / "none"))
    assert caught.value.exit_code == 2
