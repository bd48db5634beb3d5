"""Numbers beside the text: which are taken, which are refused and where, and which position holds which."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hp_core.data.columns import RowColumns
from hp_core.data.fields import RowText
from hp_core.data.fingerprint import fingerprint
from hp_core.data.reading import Reading
from hp_core.data.records import Encoded, Place, Row
from hp_core.data.text import TextEncoder
from hp_core.data.tokens import build_tokens
from hp_core.errors import ArgumentError, InputError
from tests.data.helpers import CharTokenizer, store_of, text_datasets


@dataclass
class NumberedSource:
    """Texts with one number for each column."""

    documents_: list[tuple[str, tuple[float, ...]]]
    names: tuple[str, ...] = ("w", "v")
    name: str = "a list"
    passes: int = 0

    @property
    def fingerprint(self) -> str:
        parts: list[str | float] = []
        for text, values in self.documents_:
            parts += [text, *values]
        return fingerprint("numbered", *parts)

    def rows(self, fields: Sequence[str]) -> Iterator[Row | InputError]:
        self.passes += 1
        for text, values in self.documents_:
            yield Row("list", {"text": text, **dict(zip(self.names, values, strict=False))})

    def locate(self, place: Place) -> str:
        return "list"


def take(value: Any, *, is_typed: bool = True) -> float:
    return RowColumns.of(["w"])(Row("a.jsonl:7", {"text": "a", "w": value}, is_typed))[0]


@pytest.mark.parametrize("value", [0, 1, -3, 0.1, 2.5, 2**24, 2**30, -(2**24), 1e-30, 3e38 // 2**110 * 2**110])
def test_numbers_that_are_taken(value: float) -> None:
    assert take(value) == value
    assert take(str(value), is_typed=False) == value


def test_a_missing_column_says_which_fields_there_are() -> None:
    with pytest.raises(InputError) as caught:
        RowColumns.of(["weight"])(Row("a.jsonl:7", {"text": "a", "weigth": 1}))
    assert str(caught.value) == (
        "a.jsonl:7: the row has no field 'weight'; its fields are: text, weigth; did you mean 'weigth'?"
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "is null; every document needs a number"),
        (True, "is True of type bool, not a number"),
        ("0.5", "is the text '0.5', not a number"),
        ([1.0, 2.0], "is a list; it must be one number for the whole document, whose tokens are not known yet"),
        ({"a": 1}, "is {'a': 1} of type dict, not a number"),
        (float("nan"), "is nan, which is not finite"),
        (float("-inf"), "is -inf, which is not finite"),
        (1e39, "is beyond the range of float32"),
        (10**400, "is beyond the range of float32"),
        (1e-46, "is 1e-46, which float32 would round to 0"),
        (2**24 + 1, "is 16777217, a whole number that float32 would change to 16777216"),
        (2.0**24 + 1, "is 16777217.0, a whole number that float32 would change to 16777216"),
    ],
)
def test_values_that_are_refused(value: Any, said: str) -> None:
    with pytest.raises(InputError) as caught:
        take(value)
    assert str(caught.value) == f"a.jsonl:7: column 'w' {said}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is null"),
        (" ", "is null"),
        ("much", "is the text 'much', not a number"),
        ("1_000", "is the text '1_000'"),
        ("nan", "is the text 'nan'"),
        ("0x10", "is the text '0x10'"),
        ("1e400", "is inf, which is not finite"),
        ("9" * 5000, "is inf, which is not finite"),
        ("16777217", "would change to 16777216"),
    ],
)
def test_cells_that_are_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        take(text, is_typed=False)


@pytest.mark.parametrize(
    ("names", "path", "said"),
    [
        (["a", ""], "columns[1]", "empty"),
        (["a", "b", "a"], "columns[2]", "'a' is repeated"),
        (["input_ids"], "columns[0]", "meaning of its own"),
        (["labels"], "columns[0]", "meaning of its own"),
        (["mtp_labels"], "columns[0]", "meaning of its own"),
        (["sample_ids"], "columns[0]", "meaning of its own"),
    ],
)
def test_names_that_are_refused(names: list[str], path: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=said) as caught:
        RowColumns.of(names)
    assert caught.value.path == path


def test_every_position_of_a_document_holds_its_value_and_padding_holds_zero(tmp_path: Path) -> None:
    # Documents of 3, 0, 1, 5 and 2 tokens with EOS; the empty one and the one of a single token are left out.
    source = NumberedSource([("ab", (2, 10)), ("", (9, 90)), ("\0", (8, 80)), ("cdef", (0.5, 5)), ("g", (-1, 1))])
    rows = text_datasets(source, tokenizer=CharTokenizer(), max_seq_len=4, cache_dir=tmp_path, columns=("w", "v")).train
    samples: list[Any] = [rows[number] for number in range(3)]
    assert [sample["input_ids"].tolist() for sample in samples] == [[97, 98, 0, 99], [100, 101, 102, 0], [103, 0, 0, 0]]
    assert [sample["labels"].tolist() for sample in samples] == [
        [98, 0, -100, 100],
        [101, 102, 0, -100],
        [0, -100, -100, -100],
    ]
    assert [sample["w"].tolist() for sample in samples] == [[2, 2, 2, 0.5], [0.5] * 4, [-1, -1, 0, 0]]
    assert [sample["v"].tolist() for sample in samples] == [[10, 10, 10, 5], [5] * 4, [1, 1, 0, 0]]
    assert {sample[name].dtype for sample in samples for name in "wv"} == {np.dtype(np.float32)}
    sent: Any = pickle.loads(pickle.dumps(rows))[1]
    assert sent["w"].tolist() == [0.5] * 4
    empty: Any = rows[-1]
    assert empty["w"].tolist() == [0, 0, 0, 0]
    assert empty["w"].dtype == np.float32


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=10),
    max_seq_len=st.integers(2, 6),
    fraction=st.sampled_from([0.0, 0.3]),
)
def test_a_label_stands_at_the_value_of_its_document(
    tmp_path: Path, lengths: list[int], max_seq_len: int, fraction: float
) -> None:
    """Each document is made of one character, and its value is that character's code point."""
    texts = [chr(200 + number) * length for number, length in enumerate(lengths)]
    assume(any(lengths))
    source = NumberedSource([(text, (200.0 + number,)) for number, text in enumerate(texts)])
    try:
        datasets = text_datasets(
            source,
            tokenizer=CharTokenizer(),
            max_seq_len=max_seq_len,
            cache_dir=tmp_path,
            validation_fraction=fraction,
            columns=("w",),
        )
    except ArgumentError:
        # The hashes of a few documents may hold all of them out.
        assume(False)
    seen = 0
    for dataset in (datasets.train, datasets.validation):
        for index in range(len(dataset) if dataset is not None else 0):
            sample: Any = dataset[index]  # type: ignore[index]
            for token, label, weight in zip(sample["input_ids"], sample["labels"], sample["w"], strict=True):
                assert label in (-100, 0, weight)
                assert token in (0, weight)
                seen += label == weight
    assert seen == sum(length - 1 for length in lengths if length)


def test_columns_have_caches_of_their_own(tmp_path: Path) -> None:
    source = NumberedSource([("ab", (1.0, 1.0)), ("c", (2.0, 2.0))])
    swapped = NumberedSource([("ab", (2.0, 2.0)), ("c", (1.0, 1.0))])
    none = NumberedSource([("ab", ()), ("c", ())])
    tokenizer = CharTokenizer()
    plain = store_of(none, tokenizer, tmp_path)
    assert not (plain.directory / "columns.npy").exists()
    stores = [store_of(one, tokenizer, tmp_path, name) for one in (source, swapped) for name in ("w", "v")]
    assert len({store.key for store in (plain, *stores)}) == 5
    assert [store.values[:, 0].tolist() for store in stores] == [[1, 2], [1, 2], [2, 1], [2, 1]]
    store_of(source, tokenizer, tmp_path, "w")
    assert source.passes == 2


@pytest.mark.parametrize("remaining", [0, 3, 130])
def test_a_damaged_column_is_built_again(tmp_path: Path, remaining: int) -> None:
    source = NumberedSource([("ab", (1.5,)), ("c", (2.5,))])
    path = store_of(source, CharTokenizer(), tmp_path, "w").directory / "columns.npy"
    path.write_bytes(path.read_bytes()[:remaining])
    assert store_of(source, CharTokenizer(), tmp_path, "w").values.tolist() == [[1.5], [2.5]]


class ForgetfulEncoder(TextEncoder):
    def encode(self, rows: Sequence[Row]) -> list[Encoded | InputError]:
        return [Encoded(np.array([1, 2]), 0) for _ in rows]


def test_an_encoder_that_forgets_values_is_an_error_of_its_author(tmp_path: Path) -> None:
    encoder = ForgetfulEncoder(CharTokenizer(), RowText.of(), RowColumns.of(["w"]))
    with pytest.raises(ValueError, match="0 values for the columns"):
        build_tokens(NumberedSource([("ab", ())]), encoder, Reading(tmp_path))
