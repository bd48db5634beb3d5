from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hp_core.data.protocols import Datasets, RowDataset
from hp_core.errors import ArgumentError, InputError
from tests.data.helpers import CharTokenizer, LearnedTokenizer, ListSource, text_datasets

TEXTS = [f"<{number}>" for number in range(40)]


def texts_of(rows: RowDataset) -> list[str]:
    ids = [token for number in range(len(rows)) for token in rows[number]["input_ids"].tolist()]
    return [f"<{part}>" for part in "".join(map(chr, ids)).replace("\0", "").strip("<>").split("><")]


def build(source: ListSource, cache_dir: Path, tokenizer: object = None, **options: object) -> Datasets:
    return text_datasets(
        source,
        tokenizer=tokenizer or CharTokenizer(),  # type: ignore[arg-type]
        max_seq_len=16,
        cache_dir=cache_dir,
        **options,  # type: ignore[arg-type]
    )


def test_training_and_validation_hold_each_document_once(tmp_path: Path) -> None:
    datasets = build(ListSource(TEXTS), tmp_path, validation_fraction=0.2)
    assert datasets.validation is not None
    train, validation = texts_of(datasets.train), texts_of(datasets.validation)
    assert sorted(train + validation) == sorted(TEXTS)
    assert 1 <= len(validation) < len(train)
    assert datasets.train.fingerprint != datasets.validation.fingerprint


def test_without_a_fraction_all_documents_are_training_rows(tmp_path: Path) -> None:
    datasets = build(ListSource(TEXTS), tmp_path)
    assert datasets.validation is None
    assert texts_of(datasets.train) == TEXTS


def test_another_fraction_does_not_encode_again(tmp_path: Path) -> None:
    tokenizer = CharTokenizer()
    for fraction in (0.0, 0.1, 0.2):
        build(ListSource(TEXTS), tmp_path, tokenizer, validation_fraction=fraction)
    assert tokenizer.calls == 1


def test_validation_documents_of_their_own(tmp_path: Path) -> None:
    datasets = build(ListSource(TEXTS), tmp_path, validation_source=ListSource(["<a>", "<b>"]))
    assert datasets.validation is not None
    assert texts_of(datasets.validation) == ["<a>", "<b>"]
    assert texts_of(datasets.train) == TEXTS


@pytest.mark.parametrize("fraction", [0.0, 1e-9, 0.3])
def test_a_learned_tokenizer_sees_the_training_documents_only(tmp_path: Path, fraction: float) -> None:
    learned = LearnedTokenizer()
    datasets = build(ListSource(TEXTS), tmp_path, learned, validation_fraction=fraction)
    assert learned.seen == texts_of(datasets.train)
    assert isinstance(datasets.tokenizer, CharTokenizer)


def test_rows_have_an_empty_row(tmp_path: Path) -> None:
    empty = build(ListSource(TEXTS), tmp_path).train[-1]
    assert set(empty["labels"].tolist()) == {-100}


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"validation_fraction": 0.1, "validation_source": ListSource(["a"])}, "validation_fraction"),
        ({"max_seq_len": 1}, "max_seq_len"),
        ({"tokenizer": None}, "tokenizer"),
    ],
)
def test_arguments_that_can_not_be_used(tmp_path: Path, options: dict[str, object], path: str) -> None:
    arguments = {"tokenizer": CharTokenizer(), "max_seq_len": 16, "cache_dir": tmp_path, **options}
    with pytest.raises(ArgumentError) as caught:
        text_datasets(ListSource(TEXTS), **arguments)  # type: ignore[arg-type]
    assert caught.value.path == path


@pytest.mark.parametrize("texts", [[], ["", ""], ["\0"]])
def test_data_without_anything_to_predict_is_refused(tmp_path: Path, texts: list[str]) -> None:
    with pytest.raises(InputError, match="training data has nothing to predict"):
        build(ListSource(texts), tmp_path)
    with pytest.raises(InputError, match="validation data has nothing to predict"):
        build(ListSource(TEXTS), tmp_path, validation_source=ListSource(texts))


def test_planning_data_imports_no_framework() -> None:
    """A check of a recipe's data must not wait for torch, and a broken install of datasets must not matter here."""
    heavy = ("torch", "transformers", "datasets", "pyarrow", "tokenizers")
    modules = "build, cache, fields, hub, order, packing, protocols, readers, rows, sources, split, text, tokens"
    code = f"import sys\nfrom hp_core.data import {modules}\nprint([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
