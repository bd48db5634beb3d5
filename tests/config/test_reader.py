"""Recipe text to located values."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_core.config.node import MapNode, find, to_data
from hp_core.config.reader import read_file, read_yaml
from hp_core.config.scalar import resolve_plain
from hp_core.errors import Origin


def read(text: str) -> tuple[Any, list[str]]:
    document = read_yaml(text, lambda line, column: Origin("r.yaml", line, column))
    problems = [str(problem) for problem in document.problems]
    return None if document.root is None else to_data(document.root), problems


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-5", 1e-5),
        ("1E-5", 1e-5),
        ("1e5", 1e5),
        ("+1e-5", 1e-5),
        ("1.0e5", 1e5),
        ("1.e-5", 1e-5),
        ("1.0e-5", 1e-5),
        ("1.0e+5", 1e5),
        (".5", 0.5),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("no", "no"),
        ("Yes", "Yes"),
        ("NO", "NO"),
        ("y", "y"),
        ("n", "n"),
        ("None", "None"),
        ("none", "none"),
        ("null", None),
        ("~", None),
        ("", None),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("12:30", "12:30"),
        ("1:30:00", "1:30:00"),
        ("1_000", 1000),
        ("1_000.5", 1000.5),
        ("_1", "_1"),
        ("1__0", "1__0"),
        ("2024-01-01", "2024-01-01"),
        ("inf", "inf"),
        ("nan", "nan"),
        ("=", "="),
        ("true", True),
        ("FALSE", False),
        ("tRue", "tRue"),
        ("-", "-"),
        (".", "."),
        ("1.2.3", "1.2.3"),
        ("0b11", "0b11"),
    ],
)
def test_plain_scalar(written: str, value: object) -> None:
    found = resolve_plain(written)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("written", ["'1e-5'", '"true"', "!!str 1e-5", "! 12", "|-\n  1"])
def test_quoted_scalar_stays_text(written: str) -> None:
    data, problems = read(f"key: {written}\n")
    assert isinstance(data["key"], str)
    assert problems == []


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("a: !!float 1\n", {"a": 1.0}),
        ("a: !!int '1'\n", {"a": 1}),
        ("on: 1\n1: 2\nnull: 3\n", {"on": 1, "1": 2, "null": 3}),
        ('{"a":1, b}', {"a": 1, "b": None}),
        ("a: 1 # one\r\nb: 2\r\n", {"a": 1, "b": 2}),
    ],
)
def test_document(text: str, data: object) -> None:
    assert read(text) == (data, [])


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.booleans())
def test_python_number_reads_back_exactly(value: object) -> None:
    written = str(value).lower() if isinstance(value, bool) else repr(value)
    assert resolve_plain(written) == value
    assert type(resolve_plain(written)) is type(value)


def test_everything_has_an_origin() -> None:
    document = read_yaml("a:\n  b: [x, {c: 1}]\n", lambda line, column: Origin("r.yaml", line, column))
    root = document.root
    assert isinstance(root, MapNode)
    assert root.entries["a"].key_origin == Origin("r.yaml", 1, 1)
    positions = {path: find(root, path).origin for path in [("a",), ("a", "b", 0), ("a", "b", 1, "c")]}  # type: ignore[union-attr]
    assert positions == {
        ("a",): Origin("r.yaml", 2, 3),
        ("a", "b", 0): Origin("r.yaml", 2, 7),
        ("a", "b", 1, "c"): Origin("r.yaml", 2, 14),
    }


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n", {"x": 1, "y": 3}),
        ("a: &a {x: 1, y: 2}\nb:\n  y: 3\n  <<: *a\n", {"y": 3, "x": 1}),
        ("a: &a {x: 1}\nc: &c {x: 2, z: 3}\nb:\n  <<: *a\n  <<: *c\n", {"x": 2, "z": 3}),
        ("a: &a {x: 1}\nc: &c {x: 2, z: 3}\nb:\n  <<: [*a, *c]\n", {"x": 1, "z": 3}),
    ],
)
def test_merge_keys_are_not_repeated_keys(text: str, data: object) -> None:
    found, problems = read(text)
    assert found["b"] == data
    assert problems == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3\n", "r.yaml:3:1: a: repeated key, first on line 1; remove one of them"),
        ("s:\n  k: 1\n  k: 1\n", "r.yaml:3:3: s.k: repeated key, first on line 2; remove one of them"),
        ("a:\n\tb: 1\n", "r.yaml:2:1: a tab can't indent YAML; use spaces"),
        ("a: @x\n", "r.yaml:1:4: an unquoted text can't begin with '@'; quote it"),
        ("a: b: c\n", "r.yaml:1:5: a second ': ' in one line; quote a text that holds ': '"),
        ("a: [1\n", "r.yaml:2:1: expected ',' or ']', but got the end (it began on line 1)"),
        ("a: 'b' c\n", "r.yaml:1:8: did not expect '<scalar>' here; check the indentation and the quotes"),
        ("a: 1\nb\nc: 2\n", "r.yaml:3:1: line 2 has no ': ' after its key"),
        ("a: 1\n---\nb: 1\n", "r.yaml:2:1: a second document begins here; a recipe is one document"),
        ("%YAML 1.1\n---\na: no\n", "r.yaml:2:1: recipes are YAML 1.2; remove the %YAML line"),
        ("[a]: 1\n", "r.yaml:1:1: a list or mapping can't be a key"),
        ("a: \x07\n", "r.yaml:1:4: holds the character U+0007, which YAML forbids"),
        ("<<: 3\n", "r.yaml:1:5: '<<' merges a mapping or a list of mappings"),
        (
            "a: [${env:A}]\n",
            "r.yaml:1:6: expected ',' or ']', but got '{'; "
            'inside [ ] and { } write the expression in quotes: "${env:NAME}"',
        ),
    ],
)
def test_faulty_text(text: str, problem: str) -> None:
    assert read(text)[1] == [problem]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("*nowhere", "alias '*nowhere' has no anchor '&nowhere' before it"),
        ("&me [*me]", "alias '*me' has no anchor '&me' before it"),
        ("!foo 1", "the tag '!foo' means nothing in a recipe"),
        ("!!python/object:os.system {}", "the tag '!!python/object:os.system' means nothing in a recipe"),
        ("!!int x", "'x' is not of the type its tag says"),
        (".nan", "must be a finite number, got '.nan'"),
        ("1e999", "must be a finite number, got '1e999'"),
        ("9" * 5000, "is a number of too many digits"),
        (r'"\ud800"', "holds half of a surrogate pair, not a character"),
    ],
)
def test_value_that_can_not_be_found_out(written: str, message: str) -> None:
    document = read_yaml(f"a: {written}\n", lambda line, column: Origin("r.yaml", line, column))
    assert document.root is not None
    node = find(document.root, ("a",))
    while not hasattr(node, "problem"):
        node = find(node, (0,))  # type: ignore[arg-type]
    assert node.problem.message == message  # type: ignore[union-attr]


def test_nesting_too_deep_is_an_error() -> None:
    assert read("[" * 100 + "]" * 100)[1] == []
    assert read("[" * 102 + "]" * 102)[1] == ["r.yaml:1:102: is nested too deeply"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\xef\xbb\xbfa: 1\n", []),
        (b"a: 1\nb: \xff\n", [":2:4: is not UTF-8 text; save the file as UTF-8"]),
        ("a: 1\n".encode("utf-16"), [":1:1: is not UTF-8 text; save the file as UTF-8"]),
    ],
)
def test_file_encoding(tmp_path: pathlib.Path, content: bytes, problem: list[str]) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    assert [str(one).removeprefix(str(path)) for one in read_file(str(path)).problems] == problem
