from __future__ import annotations

from pathlib import Path

import pytest

from hp_core.data.records import Row
from hp_core.data.sources import FileSource, expand_files
from hp_core.errors import ArgumentError


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
        ([], "files", "is empty"),
    ],
)
def test_entries_that_stand_for_nothing_usable(data: Path, files: str | list[str], path: str, said: str) -> None:
    (data / "empty").mkdir()
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
