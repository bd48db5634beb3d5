"""The keys that an annotation knows, and those in a value that it doesn't."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from typing_extensions import is_typeddict

from hp_core.config.node import ListNode, MapNode, Node
from hp_core.config.path import Path

# pydantic ignores unknown keys in these unless their author says otherwise; a recipe never does.


def fields_of(annotation: Any) -> dict[str, Any] | None:
    """Return the keys of a model, dataclass or typed dict with their annotations; None if any key is right."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation.model_config.get("extra") == "allow":
            return None
        return {str(field.alias or name): field.annotation for name, field in annotation.model_fields.items()}
    if is_typeddict(annotation) or (isinstance(annotation, type) and dataclasses.is_dataclass(annotation)):
        try:
            hints = typing.get_type_hints(annotation, include_extras=True)
        except Exception:
            hints = dict.fromkeys(getattr(annotation, "__annotations__", {}), Any)
        if dataclasses.is_dataclass(annotation):
            return {field.name: hints.get(field.name, Any) for field in dataclasses.fields(annotation) if field.init}
        return hints
    return None


def members(annotation: Any) -> Iterator[Any]:
    """Yield the alternatives of an annotation without `Annotated`, `Required` and unions around them."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated or getattr(origin, "_name", "") in ("Required", "NotRequired", "ReadOnly"):
        yield from members(typing.get_args(annotation)[0])
    elif origin is typing.Union or type(annotation).__name__ == "UnionType":
        for one in typing.get_args(annotation):
            yield from members(one)
    else:
        yield annotation


def known_keys(annotation: Any, path: Path) -> list[str]:
    """Return the keys that a value of this annotation may have at a path inside it.

    The annotation may also be a mapping from keys to annotations.
    """
    annotations = [annotation]
    if isinstance(annotation, Mapping):
        if not path:
            return sorted(annotation)
        annotations, path = [annotation[str(path[0])]], path[1:]
    for step in path:
        annotations = [below for one in annotations for below in _below(one, step)]
    return sorted({key for one in annotations for member in members(one) for key in fields_of(member) or ()})


def unknown_keys(annotation: Any, node: Node, path: Path = ()) -> Iterator[Path]:
    """Yield the path of each key in a value that none of the annotation's models, dataclasses or typed dicts has."""
    if isinstance(node, MapNode):
        shapes = [fields_of(member) for member in members(annotation) if _takes_mapping(member)]
        known = {key for shape in shapes for key in shape or ()}
        for key, entry in node.entries.items():
            if shapes and None not in shapes and key not in known:
                yield (*path, key)
            else:
                for below in _below(annotation, key):
                    yield from unknown_keys(below, entry.node, (*path, key))
    elif isinstance(node, ListNode):
        for index, item in enumerate(node.items):
            for below in _below(annotation, index):
                yield from unknown_keys(below, item, (*path, index))


def _takes_mapping(member: Any) -> bool:
    origin = typing.get_origin(member) or member
    if member is Any or not isinstance(origin, type):
        return member is Any or is_typeddict(origin)
    return (
        origin is object
        or is_typeddict(member)
        or issubclass(origin, BaseModel)
        or dataclasses.is_dataclass(origin)
        or hasattr(origin, "keys")
    )


def _below(annotation: Any, step: str | int) -> list[Any]:
    """Return the annotations that a step into a value of this annotation may lead to."""
    found: list[Any] = []
    for member in members(annotation):
        fields = fields_of(member)
        arguments = typing.get_args(member)
        if fields is not None:
            found += [fields[str(step)]] if isinstance(step, str) and step in fields else []
        elif len(arguments) == 2 and isinstance(step, str):
            found.append(arguments[1])
        elif isinstance(step, int) and arguments:
            is_fixed = typing.get_origin(member) is tuple and arguments[-1] is not Ellipsis
            found += [arguments[step]] if is_fixed and step < len(arguments) else [] if is_fixed else [arguments[0]]
    return found
