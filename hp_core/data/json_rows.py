"""Rows of JSON files: one object a line, or a list of objects."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hp_core.data.records import Place, Row
from hp_core.data.units import BOM, BrokenFileError, Unit, failed, opened, require_utf8, single
from hp_core.errors import InputError

_HEAD = 1 << 16
_SPACE = re.compile(r"[ \t\n\r]*")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json_lines(path: Path, fields: Sequence[str], part: int) -> Iterator[Unit]:
    """One object a line, or several; blank lines are none. A unit is a line."""
    yield from _lines(path, fields, part)


def read_json(path: Path, fields: Sequence[str], part: int) -> Iterator[Unit]:
    """A list of objects, whose text is read whole, or one object a line, as `read_json_lines`."""
    if holds_a_list(path):
        yield from _list(path, fields, part)
    else:
        yield from _lines(path, fields, part, hint="; a .json file holds a list of objects, or one object a line")


def holds_a_list(path: Path) -> bool:
    """Whether a `.json` file is one list. Raises `BrokenFileError` for a file that isn't UTF-8 at all."""
    with opened(path) as file:
        head = file.read(_HEAD)
    require_utf8(path, head)
    return head.removeprefix(BOM).lstrip()[:1] == b"["


def _lines(path: Path, fields: Sequence[str], part: int, hint: str = "") -> Iterator[Unit]:
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                require_utf8(path, line)
                line = line.removeprefix(BOM)
            # What is before the first value stays, so that columns are those of the line.
            content = line.rstrip()
            if content:
                yield partial(_line_rows, content, path, Place(part, number), fields, hint)


def _line_rows(
    content: bytes, path: Path, place: Place, fields: Sequence[str], hint: str
) -> Sequence[Row | InputError]:
    """The objects of a line, or the line's one fault: nothing of a line is trusted that is broken somewhere."""
    location = f"{path}:{place.number}"
    try:
        text = content.decode()
        values = list(_values(text))
    except UnicodeDecodeError as error:
        return [InputError(f"{location}: not valid UTF-8 (byte {error.start + 1})")]
    except json.JSONDecodeError as error:
        return [InputError(f"{location}: not valid JSON: {error.msg} (column {error.colno}){hint}")]
    except (ValueError, RecursionError) as error:
        return [InputError(f"{location}: not valid JSON: {_reason(error)}")]
    rows: list[Row | InputError] = [_row(value, location, place) for value in values]
    if _ESCAPED_SURROGATE.search(text):
        rows = [_without_half_pairs(row, fields) for row in rows]
    return rows


def _values(text: str) -> Iterator[Any]:
    """The values that follow one another in a line, which is not blank."""
    position = _skip_space(text, 0)
    while position < len(text):
        value, position = _DECODER.raw_decode(text, position)
        yield value
        position = _skip_space(text, position)


def _list(path: Path, fields: Sequence[str], part: int) -> Iterator[Unit]:
    """The items of a list, one by one; broken JSON ends it, as nothing tells where the next item would begin."""
    with opened(path) as file:
        content = file.read().removeprefix(BOM)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        raise BrokenFileError(f"{path}:{line}: not valid UTF-8 (byte {column} of the line)") from error
    del content
    position = _skip_space(text, _skip_space(text, 0) + 1)
    number, line, counted = 0, 1, 0
    is_open = text[position : position + 1] != "]"
    while is_open:
        number += 1
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, position = _DECODER.raw_decode(text, position)
        except json.JSONDecodeError as error:
            yield _failed_at(path, text, error.pos, f"{error.msg} in row {number}")
            return
        except (ValueError, RecursionError) as error:
            yield failed(f"{path}:{line}: not valid JSON: {_reason(error)} in row {number}")
            return
        row = _row(value, f"{path}:{line} (row {number})", Place(part, number))
        yield single(_without_half_pairs(row, fields))
        position = _skip_space(text, position)
        is_open = text[position : position + 1] == ","
        if is_open:
            position = _skip_space(text, position + 1)
        elif text[position : position + 1] != "]":
            yield _failed_at(path, text, position, f"expecting ',' or ']' after row {number}")
            return
    rest = _skip_space(text, position + 1)
    if rest < len(text):
        yield _failed_at(path, text, rest, "extra data after the list")


def _failed_at(path: Path, text: str, position: int, message: str) -> Unit:
    error = json.JSONDecodeError(message, text, position)
    return failed(f"{path}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})")


def _skip_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    assert found is not None
    return found.end()


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is repeated")
    return unique


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)


def _reason(error: Exception) -> str:
    return "nested too deep" if isinstance(error, RecursionError) else str(error)


def _row(value: Any, location: str, place: Place) -> Row | InputError:
    if isinstance(value, dict):
        return Row(location, value, place=place)
    kind = "null" if value is None else f"a {type(value).__name__}"
    return InputError(f"{location}: a row must be a JSON object, this is {kind}")


def _without_half_pairs(row: Row | InputError, fields: Sequence[str]) -> Row | InputError:
    """The row, or a fault where a field that is used holds half a surrogate pair, which is no text."""
    if isinstance(row, InputError):
        return row
    for name in fields:
        try:
            found = _half_pair(row.fields.get(name), name)
        except RecursionError:
            return InputError(f"{row.location}: {name}: nested too deep")
        if found is not None:
            path, index, character = found
            half = f"character {index} is {character!a}, half of a surrogate pair"
            return InputError(f"{row.location}: {path}: {half}")
    return row


def _half_pair(value: Any, path: str) -> tuple[str, int, str] | None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return path, error.start + 1, value[error.start]
    inner: list[tuple[str, Any]] = []
    if isinstance(value, list):
        inner = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    elif isinstance(value, Mapping):
        inner = [(f"{path}.{key}", part) for key, item in value.items() for part in (key, item)]
    return next((found for where, item in inner if (found := _half_pair(item, where)) is not None), None)
