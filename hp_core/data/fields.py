"""The text of a row: one of its fields, or a template over several."""

from __future__ import annotations

from dataclasses import dataclass
from string import Formatter
from typing import Any

from hp_core.data.records import Row
from hp_core.errors import ArgumentError, InputError
from hp_core.spelling import did_you_mean

DEFAULT_FIELD = "text"


@dataclass(frozen=True)
class RowText:
    """Makes a row's text. `parts` are (literal text, field name or None for none), one after the other."""

    parts: tuple[tuple[str, str | None], ...]
    is_template: bool

    @classmethod
    def of(cls, field: str | None = None, template: str | None = None) -> RowText:
        """The text of `field` (default `text`), or of a template such as `"{question}\\n{answer}"`.

        `{{` and `}}` are braces. Raises `ArgumentError` if both are given or the template can't be used.
        """
        if template is None:
            return cls((("", DEFAULT_FIELD if field is None else field),), is_template=False)
        if field is not None:
            raise ArgumentError("template", "field and template are both given", "drop one of them")
        parts: list[tuple[str, str | None]] = []
        try:
            parsed = list(Formatter().parse(template))
        except ValueError as error:
            raise ArgumentError("template", f"{template!r}: {error}", "write {{ or }} for a brace") from error
        for literal, name, spec, conversion in parsed:
            if name is not None and (not name or spec or conversion or set(name) & set(".[]") or name.isdigit()):
                raise ArgumentError(
                    "template", f"{template!r}: a place is written {{name}}, with the field's name only"
                )
            parts.append((literal, name))
        if not any(name for _, name in parts):
            raise ArgumentError("template", f"{template!r} names no field, so every document would be the same")
        return cls(tuple(parts), is_template=True)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that are read."""
        return tuple(name for _, name in self.parts if name is not None)

    @property
    def identity(self) -> tuple[str | None, ...]:
        """What changes the text, for a fingerprint."""
        return (str(self.is_template), *(part for pair in self.parts for part in pair))

    def __call__(self, row: Row) -> str:
        """The row's text. Raises `InputError` for a field that is missing, null or not text."""
        if not self.is_template:
            name = self.parts[0][1]
            assert name is not None
            return self._value(row, name)
        return "".join(literal + ("" if name is None else self._value(row, name)) for literal, name in self.parts)

    def _value(self, row: Row, name: str) -> str:
        value = field_of(row, name)
        if isinstance(value, str):
            return value
        if self.is_template and isinstance(value, (int, float)):
            return str(value)
        kind = "null" if value is None else f"of type {type(value).__name__}, not text"
        raise InputError(f"{row.location}: field {name!r} is {kind}")


def field_of(row: Row, name: str) -> Any:
    """The value of a row's field. Raises `InputError`, with the fields that are there, when it is missing."""
    if name not in row.fields:
        available = ", ".join(map(str, row.fields)) or "none"
        guess = did_you_mean(name, map(str, row.fields))
        raise InputError(
            f"{row.location}: the row has no field {name!r}; its fields are: {available}"
            + (f"; {guess}" if guess else "")
        )
    return row.fields[name]
