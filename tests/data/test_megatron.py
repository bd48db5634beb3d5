"""Token files of Megatron, mapped as they are."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_core.data.megatron import JoinedTokens, MegatronIndex, MegatronSource, MegatronStore, expand_megatron
from hp_core.data.records import Place
from hp_core.errors import ArgumentError, InputError
from tests.data.helpers import CharTokenizer
from tests.data.megatron_files import write

DOCUMENTS = [[[5, 6, 7, 0]], [[8, 9], [10, 0]], [], [[11]], [[]], [[12, 13, 14]]]


def store(paths: list[Path], cache: Path, vocab_size: int = 1000) -> MegatronStore:
    return MegatronSource(paths).store(CharTokenizer(vocab_size), cache)


@pytest.mark.parametrize("letter", ["B", "b", "h", "i", "q", "H"])
def test_documents_are_mapped_as_they_are(tmp_path: Path, letter: str) -> None:
    found = store([write(tmp_path / "a", DOCUMENTS, letter)], tmp_path / "cache")
    assert isinstance(found.tokens, np.memmap)
    assert found.tokens.itemsize == struct.calcsize(letter)
    assert found.tokens.tolist() == [5, 6, 7, 0, 8, 9, 10, 0, 11, 12, 13, 14]
    # A document of two sequences is one; no end token is added.
    assert found.lengths.tolist() == [4, 4, 0, 1, 0, 3]
    assert found.places.tolist() == [[0, number] for number in range(1, 7)]
    assert found.columns == ()


def test_several_files_are_one_store_without_a_copy(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a", DOCUMENTS, "H"), write(tmp_path / "b", [[[70_000, 1]]], "i")]
    found = store(paths, tmp_path / "cache", 80_000)
    assert found.lengths.tolist() == [4, 4, 0, 1, 0, 3, 2]
    assert found.tokens[np.array([13, 0, 12, 11])].tolist() == [1, 5, 70_000, 14]
    assert found.tokens[10:13].tolist() == [13, 14, 70_000]
    assert found.places.tolist()[-1] == [1, 1]
    assert MegatronSource(paths).locate(Place(1, 1)) == f"{paths[1]}: document 1"
    again = pickle.loads(pickle.dumps(found))
    assert again.tokens[12:].tolist() == [70_000, 1]
    assert len(pickle.dumps(found)) < 3000


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=5), st.data())
def test_joined_tokens_are_the_concatenated_ones(parts: list[list[int]], data: st.DataObject) -> None:
    whole = np.array([one for part in parts for one in part], dtype=np.int64)
    joined = JoinedTokens([np.array(part, dtype=np.int32) for part in parts])
    assert len(joined) == len(whole)
    positions = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1)) if len(whole) else st.just([])), np.int64)
    assert joined[positions].tolist() == whole[positions].tolist()
    begin, end = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 20))
    assert joined[begin:end].tolist() == whole[begin:end].tolist()


def test_the_key_follows_the_content_and_the_hashes_the_documents(tmp_path: Path) -> None:
    one = write(tmp_path / "a", [[[1, 2]], [[3, 4]], [[1, 2]]])
    same = write(tmp_path / "b", [[[1, 2]], [[3, 4]], [[1, 2]]])
    other = write(tmp_path / "c", [[[1, 2]], [[3, 5]], [[1, 2]]])
    cut = write(tmp_path / "d", [[[1, 2], [3, 4]], [[1, 2]]])
    cache = tmp_path / "cache"
    first = store([one], cache)
    assert store([same], cache).key == first.key
    assert len({store([path], cache).key for path in (one, other, cut)}) == 3
    assert first.hashes[0] == first.hashes[2] != first.hashes[1]


def test_a_file_is_read_through_once_until_it_changes(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "a", [[[1, 2]]]), tmp_path / "cache"
    before = store([path], cache)
    scans = {one for one in cache.iterdir() if one.is_dir()}
    assert store([path], cache).key == before.key
    assert {one for one in cache.iterdir() if one.is_dir()} == scans
    write(path, [[[1, 3]]])
    os.utime(path, ns=(1, 1))
    assert store([path], cache).key != before.key


@pytest.mark.parametrize(
    ("documents", "letter", "said"),
    [([[[5, 1000]]], "H", "ids from 0 to 1000"), ([[[5, -1]]], "i", "ids from -1 to 5")],
)
def test_ids_that_the_tokenizer_does_not_have_are_refused(
    tmp_path: Path, documents: list[list[list[int]]], letter: str, said: str
) -> None:
    path = write(tmp_path / "a", documents, letter)
    for _ in range(2):
        with pytest.raises(InputError, match=f"{said}, and the tokenizer 'characters' has those from 0 to 999"):
            store([path], tmp_path / "cache")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"magic": b"TNTIDX\x00\x00\x00"}, "the format before Megatron's memory-mapped one"),
        ({"magic": b"something"}, r"not an index of Megatron: it begins with b'something'"),
        ({"version": 2}, "version 2 of the format; only version 1 can be read"),
        ({"letter": "d"}, "the tokens are of float64 numbers, which are no ids"),
        ({"letter": "f"}, "the tokens are of float32 numbers"),
        ({"code": 9}, "the tokens are of the unknown type 9"),
        ({"modes": True}, "holds a mode for each sequence, as a multimodal set does"),
        ({"lengths": [4, 2, -2, 1, 0, 3]}, "sequence 2 has -2 tokens"),
        (
            {"pointers": [0, 8, 14, 16, 18, 18]},
            "sequence 2 begins at byte 14, and the sequences before it end at byte 12",
        ),
        ({"bounds": [0, 1, 3, 3, 4, 5]}, "must rise from 0 to 6, its number of sequences; they go from 0 to 5"),
        ({"bounds": [0, 3, 1, 3, 4, 5, 6]}, "must rise from 0 to 6"),
        ({"bounds": [1, 3, 6]}, "they go from 1 to 6"),
        ({"bounds": []}, "they go none"),
    ],
)
def test_an_index_that_can_not_be_used_is_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    letter = settings.pop("letter", "H")
    documents = DOCUMENTS if letter == "H" else [[[1.0, 2.0]]]
    path = write(tmp_path / "a", documents, letter, **settings)
    with pytest.raises(InputError, match=said) as caught:
        MegatronIndex.of(path)
    assert str(caught.value).startswith(f"{tmp_path}/a.idx: ")


@pytest.mark.parametrize(
    ("suffix", "change", "said"),
    [
        (".bin", -1, "a.bin: the file has 23 bytes, and the 12 tokens of type uint16 in a.idx take 24"),
        (".bin", 2, "a.bin: the file has 26 bytes, and the 12 tokens"),
        (".idx", -1, "a.idx: the file has 161 bytes, and its 6 sequences and 7 document bounds take 162 bytes"),
        (".idx", 3, "a.idx: the file has 165 bytes"),
        (".idx", -140, "a.idx: the file has 22 bytes, and its header takes 34"),
    ],
)
def test_files_that_are_cut_or_do_not_fit_are_refused_with_the_numbers(
    tmp_path: Path, suffix: str, change: int, said: str
) -> None:
    path = write(tmp_path / "a", DOCUMENTS)
    content = path.with_suffix(suffix).read_bytes()
    path.with_suffix(suffix).write_bytes(content[:change] if change < 0 else content + b"\1" * change)
    with pytest.raises(InputError) as caught:
        MegatronIndex.of(path)
    assert said in str(caught.value)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_half_a_pair_is_refused(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / "a", DOCUMENTS)
    path.with_suffix(suffix).unlink()
    with pytest.raises(InputError, match=rf"a\{suffix}: No such file or directory; tokens of Megatron are two files"):
        MegatronIndex.of(path)


def test_what_entries_stand_for(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", DOCUMENTS), write(tmp_path / "a.b_text_document.bin", DOCUMENTS)
    for entry in ("one", "one.bin", "one.idx"):
        assert expand_megatron(f"{tmp_path}/{entry}") == [one]
    assert expand_megatron([f"{tmp_path}/one", f"{tmp_path}/a.b_*.bin"]) == [one, two]
    assert expand_megatron(f"{tmp_path}/*.bin") == sorted([one, two])


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{}/none", "there is no file '{}/none.bin'"),
        ("{}/n*.bin", "no .bin file matches"),
        ("{}", "is a directory; write a glob: {}/*.bin"),
        ("{}/a.bin.zst", "is compressed"),
        (["{}/a", "{}/a.idx"], "is named twice"),
        ([], "is empty"),
    ],
)
def test_entries_that_stand_for_nothing_usable(tmp_path: Path, entry: str | list[str], said: str) -> None:
    write(tmp_path / "a", DOCUMENTS)
    filled = entry.format(tmp_path) if isinstance(entry, str) else [one.format(tmp_path) for one in entry]
    with pytest.raises(ArgumentError) as caught:
        expand_megatron(filled)
    assert said.format(tmp_path) in str(caught.value)
