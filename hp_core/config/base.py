"""What every section of a recipe is: frozen, strict about types, without unknown keys."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from typing_extensions import Self

# pydantic's error type for a conflict.
CONFLICT = "conflict"


@dataclass(frozen=True)
class Conflict:
    """Values of a section that don't go together.

    `key` is the one to point at: dotted if it is further inside, empty for the section itself.
    """

    message: str
    key: str = ""
    hint: str = ""


class Section(BaseModel):
    """A group of recipe keys: frozen, strict about types, without unknown keys.

    `LATER` are keys of the recipe language that this version doesn't implement: any content is an error.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    LATER: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        """Yield what is wrong with the values together. Keys may be absent, and values of a wrong type."""
        yield from ()

    @classmethod
    def recipe_keys(cls) -> dict[str, FieldInfo]:
        """Return the fields by the keys that a recipe has for them, which python may keep for itself (`async`)."""
        return {field.alias or name: field for name, field in cls.model_fields.items()}

    @model_validator(mode="after")
    def _without_conflicts(self) -> Self:
        keys = zip(type(self).recipe_keys(), type(self).model_fields, strict=True)
        for conflict in type(self).conflicts({key: self.__dict__[name] for key, name in keys}):
            raise PydanticCustomError(CONFLICT, "{message}", {"message": conflict.message})
        return self


def section_in(annotation: Any) -> tuple[type[Section] | None, bool]:
    """Return the section that values of a field are, or those in its list, and whether it is a list; None if none."""
    is_list = typing.get_origin(annotation) is list
    inner = typing.get_args(annotation)[0] if is_list else annotation
    return (inner if isinstance(inner, type) and issubclass(inner, Section) else None), is_list


def value_at(values: Any, *keys: str) -> Any:
    """Return the value at a path through sections, or the maps that they are made from; None where there is none."""
    for key in keys:
        if isinstance(values, Section):
            values = values.__dict__.get(key)
        else:
            values = values.get(key) if isinstance(values, Mapping) else None
    return values
