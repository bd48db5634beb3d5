from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from hp_core.data import writing
from hp_core.errors import InputError
from tests.data.helpers import CharTokenizer, ListSource, store_of


def test_documents_end_with_one_eos_and_empty_ones_hold_nothing(tmp_path: Path) -> None:
    store = store_of(ListSource(["ab", "", "c\0"]), CharTokenizer(), tmp_path)
    assert store.tokens.tolist() == [97, 98, 0, 99, 0]
    assert store.lengths.tolist() == [3, 0, 2]
    assert len(set(store.hashes.tolist())) == 3


def test_the_second_build_reads_and_encodes_nothing(tmp_path: Path) -> None:
    source, tokenizer = ListSource(["ab", "c"]), CharTokenizer()
    first = store_of(source, tokenizer, tmp_path)
    second = store_of(source, tokenizer, tmp_path)
    assert (source.passes, tokenizer.calls) == (1, 1)
    assert second.directory == first.directory


def test_other_text_and_another_tokenizer_have_another_key(tmp_path: Path) -> None:
    keys = {
        store_of(ListSource(["ab", "c"]), CharTokenizer(), tmp_path).key,
        store_of(ListSource(["a", "bc"]), CharTokenizer(), tmp_path).key,
        store_of(ListSource(["c", "ab"]), CharTokenizer(), tmp_path).key,
        store_of(ListSource(["ab", "c"]), CharTokenizer(vocab_size=2000), tmp_path).key,
    }
    assert len(keys) == 4


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_ids_take_two_bytes_where_they_fit(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    last = chr(vocab_size - 1)
    store = store_of(ListSource([last]), CharTokenizer(vocab_size=vocab_size), tmp_path)
    assert store.tokens.dtype == np.dtype(dtype)
    assert store.tokens.tolist() == [vocab_size - 1, 0]


def test_an_id_outside_the_declared_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'characters' gave ids from 0 to 233, outside its vocab_size 200"):
        store_of(ListSource(["é"]), CharTokenizer(vocab_size=200), tmp_path)


def test_half_a_surrogate_pair_is_placed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"list:2: character 2 of the text is '\\ud800'"):
        store_of(ListSource(["fine", "a\ud800"]), CharTokenizer(), tmp_path)


@pytest.mark.parametrize("damaged", ["tokens.bin", "lengths.npy", "hashes.npy", "meta.json"])
@pytest.mark.parametrize("remaining", [0, 3])
def test_a_truncated_file_is_built_again(tmp_path: Path, damaged: str, remaining: int) -> None:
    source = ListSource(["ab", "cd"])
    path = store_of(source, CharTokenizer(), tmp_path).directory / damaged
    path.write_bytes(path.read_bytes()[:remaining])
    assert store_of(source, CharTokenizer(), tmp_path).tokens.tolist() == [97, 98, 0, 99, 100, 0]


def test_no_documents_are_an_empty_store_that_is_cached_too(tmp_path: Path) -> None:
    source = ListSource([])
    for _ in range(2):
        store = store_of(source, CharTokenizer(), tmp_path)
        assert (store.tokens.tolist(), store.lengths.tolist()) == ([], [])
    assert source.passes == 1


def test_a_pickled_store_carries_no_tokens(tmp_path: Path) -> None:
    store = store_of(ListSource(["x" * 50_000]), CharTokenizer(), tmp_path)
    assert len(store.tokens) == 50_001
    pickled = pickle.dumps(store)
    assert len(pickled) < 1000
    assert pickle.loads(pickled).tokens.tolist() == store.tokens.tolist()


@pytest.mark.parametrize(("documents", "characters"), [(1, 10**6), (3, 10**6), (1000, 5)])
def test_batches_do_not_show_in_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: int, characters: int
) -> None:
    texts = ["x" * size for size in (0, 1, 7, 2, 0, 4, 30)]
    whole = store_of(ListSource(texts), CharTokenizer(), tmp_path / "whole")
    monkeypatch.setattr(writing, "_BATCH_ROWS", documents)
    monkeypatch.setattr(writing, "_BATCH_CHARACTERS", characters)
    cut = store_of(ListSource(texts), CharTokenizer(), tmp_path / "cut")
    assert cut.tokens.tolist() == whole.tokens.tolist()
    assert cut.lengths.tolist() == whole.lengths.tolist() == [0, 2, 8, 3, 0, 5, 31]
