from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_core.data.hub import HubSource
from hp_core.data.readers import ending_of, location_of, read_rows, read_units
from hp_core.data.records import Fields, Place
from hp_core.errors import InputError


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(path: Path, *fields: str) -> list[Any]:
    """The rows' texts, and the faults' messages after the file's name."""
    return [
        str(row).removeprefix(str(path)) if isinstance(row, InputError) else row.fields["text"]
        for row in read_rows(path, fields or ("text",))
    ]


def locations(path: Path) -> list[str]:
    return [
        row.location.removeprefix(str(path)) for row in read_rows(path, ("text",)) if not isinstance(row, InputError)
    ]


@pytest.mark.parametrize(
    "content",
    [
        '{"text": "a"}\n{"text": "b"}\n',
        '{"text": "a"}\n\n  \n{"text": "b"}',
        '{"text": "a"}\r\n{"text": "b"}\r\n',
        '\ufeff{"text": "a"}\n{"text": "b"}',
        '{"text": "a"} {"text": "b"}',
        '{"text": "a"}{"text": "b"}\t\n',
        '{"text": "a", "score": NaN}\n{"later": null, "text": "b"}',
        '{"text": "a", "meta": null}\n{"text": "b", "meta": {"deep": [1]}}',
        '{"text": "a", "id": 1}\n{"text": "b", "id": "one"}',
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json"])
def test_json_lines_that_are_fine(tmp_path: Path, content: str, suffix: str) -> None:
    assert read(write(tmp_path / f"a{suffix}", content)) == ["a", "b"]


def test_thousands_of_nulls_and_then_a_struct(tmp_path: Path) -> None:
    lines = ['{"text": "a", "meta": null}'] * 6000 + ['{"text": "a", "meta": {"k": [1, "x"]}}']
    assert read(write(tmp_path / "a.jsonl", "\n".join(lines)), "text", "meta") == ["a"] * 6001


def test_a_line_separator_and_a_long_line_are_text(tmp_path: Path) -> None:
    values = ["a\u2028b\u0085c", "x" * 20_000_000]
    lines = "\n".join(json.dumps({"text": value}, ensure_ascii=False) for value in values)
    assert read(write(tmp_path / "a.jsonl", lines)) == values


BROKEN_LINES = [
    (b'{"text": "a"', ": not valid JSON: Expecting ',' delimiter (column 13)"),
    (b'        {"a": tru}', ": not valid JSON: Expecting value (column 15)"),
    (b'  {"text": "\xff"}', ": not valid UTF-8 (byte 13)"),
    (b'{"text": ' + b"[" * 900 + rb'"\ud800"' + b"]" * 900 + b"}", ": text: nested too deep"),
    (b'{"text": "a"} {"text": ', ": not valid JSON: Expecting value (column 23)"),
    (b'{"text": "a"}, {"text": "b"}', ": not valid JSON: Expecting value (column 14)"),
    (b'{"text": "\xff"}', ": not valid UTF-8 (byte 11)"),
    (b'{"text": "a", "text": "b"}', ": not valid JSON: the key 'text' is repeated"),
    (b'{"text": "a", "m": {"k": 1, "k": 2}}', ": not valid JSON: the key 'k' is repeated"),
    (b'["a"]', ": a row must be a JSON object, this is a list"),
    (b"null", ": a row must be a JSON object, this is null"),
    (b"[" * 100_000, ": not valid JSON: nested too deep"),
    (b'{"text": "no \\ud800 pair"}', ": text: character 4 is '\\ud800', half of a surrogate pair"),
    (b"{broken", ": not valid JSON: Expecting property name enclosed in double quotes (column 2)"),
]


@pytest.mark.parametrize(("line", "said"), BROKEN_LINES)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz"])
def test_a_broken_line_is_placed_and_the_next_is_read(tmp_path: Path, line: bytes, said: str, suffix: str) -> None:
    content = b'{"text": "one"}\n\n' + line + b'\n{"text": "two"}\n'
    path = write(tmp_path / f"a{suffix}", gzip.compress(content) if suffix.endswith("gz") else content)
    one, fault, two = read(path)
    assert (one, two) == ("one", "two")
    hint = "; a .json file holds a list of objects, or one object a line"
    assert fault.removesuffix(hint) == f":3{said}"
    assert fault.endswith(hint) == (suffix == ".json" and "(column" in fault)


def test_half_a_surrogate_pair_matters_only_where_it_is_used(tmp_path: Path) -> None:
    row = {"text": "a", "turns": [{"content": "fine \U0001f600"}, {"content": "\udc00"}]}
    path = write(tmp_path / "a.jsonl", json.dumps(row))
    assert read(path) == ["a"]
    assert read(path, "text", "turns") == [":1: turns[1].content: character 1 is '\\udc00', half of a surrogate pair"]


def test_a_broken_line_beyond_ten_megabytes_is_placed(tmp_path: Path) -> None:
    good = json.dumps({"text": "x" * 1000}) + "\n"
    path = write(tmp_path / "a.jsonl", good * 12_000 + "{broken\n" + good)
    rows = read(path)
    assert len(rows) == 12_002
    assert rows[12_000].startswith(":12001: not valid JSON")


@given(
    st.lists(
        st.one_of(
            st.text().map(lambda text: (json.dumps({"text": text}).encode(), text)),
            st.text(st.characters(exclude_categories=["Cs"])).map(
                lambda text: (json.dumps({"text": text}, ensure_ascii=False).encode(), text)
            ),
            st.sampled_from([(b"", None), (b" \t", None), (b"{", "fault"), (b"\xff", "fault"), (b"3", "fault")]),
        ),
        max_size=12,
    ),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
)
def test_every_line_is_read_whatever_stands_around_it(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[bytes, Any]], end: bytes, has_last_end: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(end.join(line for line, _ in lines) + (end if has_last_end else b""))
    found = list(read_rows(path, ()))
    expected = [(number, meant) for number, (line, meant) in enumerate(lines, start=1) if line.strip()]
    if not expected:
        assert [str(row) for row in found] == [f"{path}: the file is empty: it holds no rows"]
        return
    assert len(found) == len(expected)
    for row, (number, meant) in zip(found, expected, strict=True):
        if isinstance(row, InputError):
            assert meant == "fault"
            assert str(row).startswith(f"{path}:{number}: ")
        else:
            assert (row.fields["text"], row.location, row.place) == (meant, f"{path}:{number}", Place(0, number))


def test_a_line_that_is_not_asked_for_is_not_parsed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "one"}\n{broken\n{"text": "two"}{"text": "three"}\n')
    first, _, last = read_units(path, ("text",), 4)
    assert [row.fields["text"] for row in last() if not isinstance(row, InputError)] == ["two", "three"]
    assert [row.place for row in first() if not isinstance(row, InputError)] == [Place(4, 1)]


EMPTY = ": the file is empty: it holds no rows"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.jsonl.gz"])
@pytest.mark.parametrize("content", ["", "\n\n", "\ufeff"])
def test_an_empty_file_has_its_own_message(tmp_path: Path, name: str, content: str) -> None:
    encoded = content.encode()
    assert read(write(tmp_path / name, gzip.compress(encoded) if name.endswith("gz") else encoded)) == [EMPTY]


def test_containers_without_rows_are_empty_too(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [EMPTY]
    assert read(write(tmp_path / "a.json", "[ ]")) == [EMPTY]
    assert read(write(tmp_path / "a.csv", "text\n")) == [EMPTY]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_another_unicode_encoding_is_told(tmp_path: Path, name: str, encoding: str) -> None:
    (fault,) = read(write(tmp_path / name, '{"text": "a"}\n{"text": "b"}\n'.encode(encoding)))
    assert "UTF-16 or UTF-32, not UTF-8; convert it: iconv" in fault


def test_a_json_list_tells_lines_and_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '\ufeff \n[{"text": "a"},\n {"text":\n "b"}, {"text": "c"}]\n')
    assert read(path) == ["a", "b", "c"]
    assert locations(path) == [":2 (row 1)", ":3 (row 2)", ":4 (row 3)"]
    assert [row.place for row in read_rows(path, (), 2) if not isinstance(row, InputError)] == [
        Place(2, 1),
        Place(2, 2),
        Place(2, 3),
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            '[{"text": "a"},\n {]',
            ["a", ":2: not valid JSON: Expecting property name enclosed in double quotes in row 2 (column 3)"],
        ),
        ('[{"text": "a"},\n 3, {"text": "b"}]', ["a", ":2 (row 2): a row must be a JSON object, this is a int", "b"]),
        ('[{"text": "a"}\n {"text": "b"}]', ["a", ":2: not valid JSON: expecting ',' or ']' after row 1 (column 2)"]),
        ('[{"text": "a"},]', ["a", ":1: not valid JSON: Expecting value in row 2 (column 16)"]),
        ('[{"text": "a"}', ["a", ":1: not valid JSON: expecting ',' or ']' after row 1 (column 15)"]),
        ('[{"text": "a"}]\n]', ["a", ":2: not valid JSON: extra data after the list (column 1)"]),
        (
            '[{"text": "a"},\n{"text": "b", "text": 1}]',
            ["a", ":2: not valid JSON: the key 'text' is repeated in row 2"],
        ),
        (
            '[{"text": "\\udfff"},{"text": "b"}]',
            [":1 (row 1): text: character 1 is '\\udfff', half of a surrogate pair", "b"],
        ),
        (b'[{"text": "a"},\n{"text": "\xff"}]', [":2: not valid UTF-8 (byte 11 of the line)"]),
    ],
)
def test_a_broken_json_list_ends_where_it_breaks(tmp_path: Path, content: str | bytes, expected: list[str]) -> None:
    assert read(write(tmp_path / "a.json", content)) == expected


def test_an_object_over_several_lines_is_no_list(tmp_path: Path) -> None:
    faults = read(write(tmp_path / "d.json", '{\n "data": [{"text": "a"}]\n}'))
    assert faults[0].startswith(":1: not valid JSON")
    assert faults[0].endswith("; a .json file holds a list of objects, or one object a line")


def test_a_text_file_is_one_document_kept_as_it_is(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.txt", "\ufeffone\r\ntwo\n\nthree")) == ["one\r\ntwo\n\nthree"]
    assert read(write(tmp_path / "empty.txt", "")) == [""]
    assert read(write(tmp_path / "b.txt", b"fine\nno\xff\n")) == [":2: not valid UTF-8 (byte 3 of the line)"]


def test_csv_values_are_text_and_may_hold_lines(tmp_path: Path) -> None:
    long = "y" * 200_000
    path = write(tmp_path / "a.csv", f'\ufeffid,text\r\n1,007\r\n2,"two\nlines, ""quoted"""\r\n\r\n3,{long}\r\n')
    assert read(path) == ["007", 'two\nlines, "quoted"', long]
    # A row is where it begins.
    assert locations(path) == [":2", ":3", ":6"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"id,text\n1,a\n2\n3,c\n", ["a", ":3: 1 cells under 2 columns", "c"]),
        (b"id,text\n1,a,b\n2,c\n", [":2: 3 cells under 2 columns", "c"]),
        (b'id,text\n1,"a"b\n2,c\n', [":2: not valid CSV: ',' expected after '\"'", "c"]),
        (b'id,text\n0,z\n1,"open\n2,c\n3,d', ["z", ":3: not valid CSV: a quote in this row is never closed"]),
        (b"text,text\na,b\n", [":1: the column 'text' is repeated"]),
        (b"text\na\n\xff\nb\n", ["a", ":3: not valid UTF-8 (byte 1 of the line)", "b"]),
        (b'text\n"a\n\xc3\xa9\xff"\nb\n', [":3: not valid UTF-8 (byte 3 of the line)", "b"]),
        ("text\né\u2028é\n".encode(), ["é\u2028é"]),
    ],
)
def test_broken_csv_is_placed_and_the_next_row_is_read(tmp_path: Path, content: bytes, expected: list[str]) -> None:
    assert read(write(tmp_path / "a.csv", content)) == expected


TABLE = pa.table({"id": [1, 2, 3], "text": ["a", "b", "c"]})


def test_parquet_reads_the_used_columns_or_all(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(TABLE, path, row_group_size=2)
    rows = [row for row in read_rows(path, ("text",), 1) if not isinstance(row, InputError)]
    assert [dict(row.fields) for row in rows] == [{"text": "a"}, {"text": "b"}, {"text": "c"}]
    assert (rows[2].location, rows[2].place) == (f"{path}: row 3", Place(1, 3))
    first = next(iter(read_rows(path, ("body",))))
    assert not isinstance(first, InputError)
    assert dict(first.fields) == {"id": 1, "text": "a"}


def test_optional_columns_that_are_missing_widen_nothing(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet")
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)
    (tmp_path / "hub").mkdir()
    pq.write_table(TABLE, tmp_path / "hub/train.parquet")
    hub = HubSource(str(tmp_path / "hub"), None, "train")

    def first(fields: Fields) -> list[Any]:
        of_files = [next(iter(read_rows(tmp_path / name, fields))) for name in ("a.parquet", "a.arrow")]
        found = [*of_files, next(hub.rows(fields)), *next(hub.units(fields))()]
        return [row if isinstance(row, InputError) else dict(row.fields) for row in found]

    assert first(Fields(("text",), ("tools",))) == [{"text": "a"}] * 4
    assert first(Fields(("text",), ("tools", "id"))) == [{"id": 1, "text": "a"}] * 4
    # So that the message tells what there is.
    assert first(Fields(("body",), ("text",))) == [{"id": 1, "text": "a"}] * 4


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow_files_and_streams(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.arrow"
    with pa.OSFile(str(path), "wb") as sink:
        writer = pa.ipc.new_file(sink, TABLE.schema) if kind == "file" else pa.ipc.new_stream(sink, TABLE.schema)
        with writer:
            writer.write_table(TABLE, max_chunksize=2)
    assert read(path) == ["a", "b", "c"]


def test_a_value_that_can_not_be_converted_is_one_row_s_fault(tmp_path: Path) -> None:
    texts = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffc")]
    )
    days = pa.array([0, 0, 10**15], pa.timestamp("s"))
    pq.write_table(pa.table({"text": texts, "day": days}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ["a", ": row 2: text: not valid UTF-8 (byte 1 of the text)", "c"]
    *_, last = read(tmp_path / "a.parquet", "text", "day")
    assert last.startswith(": row 3: day: ")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("content", [b"", b"PAR1 but not really", b"ARROW1 but not really"])
def test_a_broken_binary_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (fault,) = read(write(tmp_path / name, content))
    assert fault.startswith(f": not a valid {'Parquet' if name.endswith('parquet') else 'Arrow'} file: ")


def test_a_parquet_file_cut_short_ends_with_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=2)
    whole = path.read_bytes()
    *rows, fault = read(write(path, whole[: len(whole) - 150]))
    assert rows == ["a", "b"]
    assert fault.startswith(": not a valid Arrow file: ")


def test_a_damaged_gzip_file_ends_with_a_fault(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"{number:06d}"}) + "\n" for number in range(20_000)).encode()
    packed = gzip.compress(lines)
    *rows, fault = read(write(tmp_path / "a.jsonl.gz", packed[: len(packed) // 2]))
    assert rows == [f"{number:06d}" for number in range(len(rows))]
    assert len(rows) > 1000
    assert fault.startswith(": not a valid gzip file: ")
    (fault,) = read(write(tmp_path / "b.csv.gz", b"no gzip"))
    assert fault.startswith(": not a valid gzip file: ")


def test_a_file_that_can_not_be_read_is_no_fault_of_a_row(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.csv", "a.parquet", "a.arrow", "a.txt", "a.json.gz"):
        with pytest.raises(InputError, match=f"{name}: No such file"):
            list(read_rows(tmp_path / name, ()))


@pytest.mark.parametrize(
    ("name", "content", "number", "expected"),
    [
        ("a.jsonl", "{}", 3, ":3"),
        ("a.csv.gz", "", 3, ":3"),
        ("a.json", "{}", 3, ":3"),
        ("a.json", " [{}]", 3, ": row 3"),
        ("a.parquet", "", 3, ": row 3"),
        ("a.txt", "", 0, ""),
    ],
)
def test_places_are_told(tmp_path: Path, name: str, content: str, number: int, expected: str) -> None:
    path = write(tmp_path / name, content)
    assert location_of(path, number) == f"{path}{expected}"


def test_endings() -> None:
    assert ending_of(Path("x/A.JSONL")) == ".jsonl"
    assert ending_of(Path("a.b.csv.GZ")) == ".csv.gz"
    assert ending_of(Path("README")) == ""
