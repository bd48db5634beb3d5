from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from hp_core.data.records import Place, Row
from hp_core.data.sources import FileSource, expand_files
from hp_core.errors import ArgumentError, InputError


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.jsonl", "deep/c.txt", ".hidden.txt", ".git/d.txt", "notes.md", "state.json", "x[1].txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"text": "row"}' if name.endswith("jsonl") else name)
    return tmp_path


def names(files: str | list[str], data: Path) -> list[str]:
    return [path.relative_to(data).as_posix() for path in expand_files(files)]


def test_what_entries_stand_for(data: Path) -> None:
    assert names(str(data), data) == ["a.jsonl", "b.txt", "deep/c.txt", "x[1].txt"]
    assert names([f"{data}/b.txt", f"{data}/a.jsonl"], data) == ["b.txt", "a.jsonl"]
    assert names(f"{data}/*.txt", data) == ["b.txt", "x[1].txt"]
    assert names(f"{data}/**/*.txt", data) == ["b.txt", "deep/c.txt", "x[1].txt"]
    assert names(f"{data}/x[1].txt", data) == ["x[1].txt"]


@pytest.mark.parametrize(
    ("files", "path", "said"),
    [
        ("{data}/none.txt", "files", "no file or directory"),
        ("{data}/*.parquet", "files", "no file matches"),
        (["{data}/b.txt", "{data}/none.txt"], "files[1]", "no file or directory"),
        (["{data}/b.txt", "{data}/*.txt"], "files[1]", "is named twice"),
        ("{data}/notes.md", "files", "no known ending; known: .txt, .jsonl"),
        ("{data}/empty", "files", "holds no data file"),
        ("{data}/packed", "files", "b.jsonl.zst' is compressed in a way that can't be read; decompress it"),
        ([], "files", "is empty"),
    ],
)
def test_entries_that_stand_for_nothing_usable(data: Path, files: str | list[str], path: str, said: str) -> None:
    (data / "empty").mkdir()
    (data / "packed").mkdir()
    for name in ("a.jsonl", "b.jsonl.zst"):
        (data / "packed" / name).write_text("{}")
    filled = files.format(data=data) if isinstance(files, str) else [file.format(data=data) for file in files]
    with pytest.raises(ArgumentError) as caught:
        expand_files(filled)
    assert caught.value.path == path
    assert said in str(caught.value)


def test_rows_come_file_by_file(data: Path) -> None:
    source = FileSource(expand_files(str(data)))
    rows = [row for row in source.rows(["text"]) if isinstance(row, Row)]
    assert [row.fields["text"] for row in rows] == ["row", "b.txt", "deep/c.txt", "x[1].txt"]
    assert rows[0].location == f"{data}/a.jsonl:1"
    assert [source.locate(row.place) for row in rows] == [row.location for row in rows]


def test_the_fingerprint_follows_content_order_and_format_but_not_names(tmp_path: Path) -> None:
    one, two, same = tmp_path / "one.txt", tmp_path / "two.txt", tmp_path / "same.txt"
    one.write_text("one")
    two.write_text("two")
    same.write_text("one")
    as_csv = tmp_path / "one.csv"
    as_csv.write_text("one")
    base = FileSource([one, two]).fingerprint
    assert FileSource([same, two]).fingerprint == base
    others = {
        FileSource([two, one]).fingerprint,
        FileSource([one]).fingerprint,
        FileSource([as_csv, two]).fingerprint,
    }
    one.write_text("on3")
    others.add(FileSource([one, two]).fingerprint)
    assert len(others | {base}) == 5


def test_a_directory_of_several_formats_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text('{"text": "one"}\n{"text": 1\n')
    (tmp_path / "2.csv").write_text("id,text\n7,two\n")
    (tmp_path / "3.json").write_text('[{"text": "three"}]')
    (tmp_path / "4.jsonl.gz").write_bytes(gzip.compress(b'{"text": "four"}'))
    (tmp_path / "5.txt").write_text("five")
    (tmp_path / "6.parquet").write_bytes(b"PAR1")
    pq.write_table(pa.table({"text": ["seven"]}), tmp_path / "7.parquet")
    whole = FileSource(expand_files(str(tmp_path)))
    rows = list(whole.rows(("text",)))
    texts = [row.fields["text"] for row in rows if isinstance(row, Row)]
    assert texts == ["one", "two", "three", "four", "five", "seven"]
    faults = [str(row).partition(": ")[0] for row in rows if isinstance(row, InputError)]
    assert faults == [f"{tmp_path}/1.jsonl:2", f"{tmp_path}/6.parquet"]
    places = [row.place for row in rows if isinstance(row, Row)]
    assert places == [Place(0, 1), Place(1, 2), Place(2, 1), Place(3, 1), Place(4, 0), Place(6, 1)]
    assert [whole.locate(place).removeprefix(f"{tmp_path}/") for place in places] == [
        *("1.jsonl:1", "2.csv:2", "3.json: row 1", "4.jsonl.gz:1", "5.txt", "7.parquet: row 1")
    ]
