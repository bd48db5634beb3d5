"""Components among the arguments of a component: a loss around a loss, a teacher model."""

from __future__ import annotations

import typing
from dataclasses import dataclass

from hp_core.components import Group, group
from hp_core.config.section import ComponentSection


@dataclass(frozen=True)
class ComponentOf:
    """Marks a parameter whose value is another component, which the recipe writes like any section of its kind.

    `loss: Annotated[Target, ComponentOf("hp.losses")]` takes `loss: focal` or `loss: {name: focal, gamma: 2}`. The
    callable is given a `Target`, checked like the recipe's own sections, and builds it with `loss.build()`.
    """

    group: str

    def __post_init__(self) -> None:
        group(self.group)


def nested_group(annotation: object) -> Group | None:
    """The group whose component a parameter of this annotation takes, or None."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        marks = [one for one in arguments[1:] if isinstance(one, ComponentOf)]
        return group(marks[0].group) if marks else nested_group(arguments[0])
    if origin is typing.Union or type(annotation).__name__ == "UnionType":
        return next((found for one in arguments if (found := nested_group(one)) is not None), None)
    return None


def nested_section(section: ComponentSection, key: str, found: Group) -> ComponentSection:
    """The section that an argument of a component is."""
    return ComponentSection((*section.pattern, key), found.name, found.runtime_arguments)
