"""What a plain YAML scalar means: the YAML 1.2 core schema, with `_` allowed between digits."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hp_core.config.node import ScalarValue

_WORDS: dict[str, ScalarValue] = {
    "": None,
    "~": None,
    **dict.fromkeys(("null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
# A leading zero doesn't make a number octal: `010` is ten, `0o10` is eight.
_INTEGER = re.compile(rf"[-+]?{_DIGITS}")
_OCTAL = re.compile(r"0o[0-7]+")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(rf"[-+]?(?:\.{_DIGITS}|{_DIGITS}(?:\.(?:{_DIGITS})?)?)(?:[eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"(?P<sign>[-+]?)\.(?:inf|Inf|INF)")
_NAN = re.compile(r"\.(?:nan|NaN|NAN)")


def resolve_plain(text: str) -> ScalarValue:
    """Return the value of an unquoted scalar.

    Dates, base-60 numbers and the YAML 1.1 words (`yes`, `no`, `on`, `off`) stay text. Raises `ValueError` for an
    integer of more digits than Python converts.
    """
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in "+-.0123456789":
        return text
    if _INTEGER.fullmatch(text):
        return int(text.replace("_", ""))
    if _OCTAL.fullmatch(text) or _HEXADECIMAL.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    if match := _INFINITY.fullmatch(text):
        return float(f"{match['sign']}inf")
    if _NAN.fullmatch(text):
        return float("nan")
    return text
