from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from hp_core.data.readers import read_rows
from hp_core.errors import InputError


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def texts(path: Path, fields: tuple[str, ...] = ("text",)) -> list[Any]:
    return [row.fields["text"] for row in read_rows(path, fields)]


@pytest.mark.parametrize(
    "content",
    [
        '{"text": "a"}\n{"text": "b"}\n',
        '{"text": "a"}\n\n  \n{"text": "b"}',
        '{"text": "a"}\r\n{"text": "b"}\r\n',
        '\ufeff{"text": "a"}\n{"text": "b"}',
        '{"text": "a", "score": NaN}\n{"later": null, "text": "b"}',
        '{"text": "a", "meta": null}\n{"text": "b", "meta": {"deep": [1]}}',
        '{"text": "a", "id": 1}\n{"text": "b", "id": "one"}',
    ],
)
def test_json_lines_that_are_fine(tmp_path: Path, content: str) -> None:
    assert texts(write(tmp_path / "a.jsonl", content)) == ["a", "b"]


def test_a_line_separator_and_a_long_line_are_text(tmp_path: Path) -> None:
    values = ["a\u2028b\u0085c", "x" * 20_000_000]
    lines = "\n".join(json.dumps({"text": value}, ensure_ascii=False) for value in values)
    assert texts(write(tmp_path / "a.jsonl", lines)) == values


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "a"', "not valid JSON"),
        (b'{"text": "a"} {"text": "b"}', "not valid JSON: Extra data (column 15)"),
        (b'{"text": "\xff"}', "not valid UTF-8 (byte 11)"),
        (b'{"text": "a", "text": "b"}', "the key 'text' is repeated"),
        (b'{"text": "a", "m": {"k": 1, "k": 2}}', "the key 'k' is repeated"),
        (b'["a"]', "must be a JSON object, this is a list"),
        (b"null", "must be a JSON object, this is a NoneType"),
        (b"[" * 100_000, "recursion"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json"])
def test_a_broken_line_is_placed(tmp_path: Path, line: bytes, said: str, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}", b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
    with pytest.raises(InputError) as caught:
        texts(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert said in str(caught.value)


def test_a_broken_line_far_into_the_file_is_placed(tmp_path: Path) -> None:
    good = json.dumps({"text": "x" * 1000}) + "\n"
    path = write(tmp_path / "a.jsonl", good * 12_000 + "{broken\n")
    with pytest.raises(InputError, match=r"a\.jsonl:12001: not valid JSON"):
        texts(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
@pytest.mark.parametrize("content", ["", "\n\n", "\ufeff"])
def test_an_empty_file_has_its_own_message(tmp_path: Path, name: str, content: str) -> None:
    with pytest.raises(InputError, match=rf"{name}: the file is empty"):
        texts(write(tmp_path / name, content))


def test_a_json_list(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", ' \n[{"text": "a"},\n {"text": "b"}]')
    assert [(row.location, row.fields["text"]) for row in read_rows(path, ("text",))] == [
        (f"{path}: row 1", "a"),
        (f"{path}: row 2", "b"),
    ]
    with pytest.raises(InputError, match=r"not valid JSON: .*\(line 2, column 3\)"):
        texts(write(tmp_path / "b.json", '[{"text": "a"},\n {]'))
    with pytest.raises(InputError, match=r"d\.json:1: not valid JSON: .*; a \.json file holds a list of objects"):
        texts(write(tmp_path / "d.json", '{\n "data": [{"text": "a"}]\n}'))
    with pytest.raises(InputError, match="row 2: a row must be a JSON object"):
        texts(write(tmp_path / "c.json", '[{"text": "a"}, 3]'))


def test_a_text_file_is_one_document_kept_as_it_is(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "a.txt", "\ufeffone\r\ntwo\n\nthree")) == ["one\r\ntwo\n\nthree"]
    assert texts(write(tmp_path / "empty.txt", "")) == [""]
    with pytest.raises(InputError, match=r"b\.txt:2: not valid UTF-8 \(byte 3 of the line\)"):
        texts(write(tmp_path / "b.txt", b"fine\nno\xff\n"))


def test_csv_values_are_text_and_may_hold_lines(tmp_path: Path) -> None:
    long = "y" * 200_000
    path = write(tmp_path / "a.csv", f'\ufeffid,text\r\n1,007\r\n2,"two\nlines, ""quoted"""\r\n\r\n3,{long}\r\n')
    rows = list(read_rows(path, ("text",)))
    assert [row.fields["text"] for row in rows] == ["007", 'two\nlines, "quoted"', long]
    assert [row.location for row in rows] == [f"{path}:2", f"{path}:4", f"{path}:6"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"id,text\n1,a\n2\n", ":3: 1 cells under 2 columns"),
        (b"id,text\n1,a,b\n", ":2: 3 cells under 2 columns"),
        (b'id,text\n1,"a"b\n', ":2: not valid CSV"),
        (b'id,text\n1,"open\n', ": not valid CSV"),
        (b"text,text\na,b\n", ":1: the column 'text' is repeated"),
        (b"text\na\n\xff\n", ":3: not valid UTF-8 (byte 1 of the line)"),
    ],
)
def test_broken_csv_is_placed(tmp_path: Path, content: bytes, said: str) -> None:
    path = write(tmp_path / "a.csv", content)
    with pytest.raises(InputError) as caught:
        texts(path)
    assert said in str(caught.value)


TABLE = pa.table({"id": [1, 2, 3], "text": ["a", "b", "c"]})


def test_parquet_reads_the_used_columns_or_all(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(TABLE, path, row_group_size=2)
    rows = list(read_rows(path, ("text",)))
    assert [dict(row.fields) for row in rows] == [{"text": "a"}, {"text": "b"}, {"text": "c"}]
    assert rows[2].location == f"{path}: row 3"
    assert dict(next(iter(read_rows(path, ("body",)))).fields) == {"id": 1, "text": "a"}


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow_files_and_streams(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.arrow"
    with pa.OSFile(str(path), "wb") as sink:
        writer = pa.ipc.new_file(sink, TABLE.schema) if kind == "file" else pa.ipc.new_stream(sink, TABLE.schema)
        with writer:
            writer.write_table(TABLE, max_chunksize=2)
    assert texts(path) == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("content", [b"", b"PAR1 but not really", b"ARROW1 but not really"])
def test_a_broken_binary_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    with pytest.raises(InputError, match=name):
        texts(write(tmp_path / name, content))
