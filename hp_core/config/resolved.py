"""A recipe with everything written out: bases merged, overrides applied, defaults filled in."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from hp_core.config.loader import Recipe
from hp_core.config.models import Section, TrainerConfig
from hp_core.config.node import NULL, Entry, MapNode, Node, ScalarNode, from_data, is_null
from hp_core.config.section import SECTIONS
from hp_core.errors import Origin

_ROOTS = {section.path[0]: section for section in SECTIONS if len(section.path) == 1}


def resolved_tree(recipe: Recipe) -> MapNode:
    """Return the recipe's tree with the default of every key that it leaves out.

    Arguments that a component section leaves out stay out; their defaults belong to the component.
    """
    entries: dict[str, Entry] = {}
    for key, field in TrainerConfig.model_fields.items():
        if key == "base":
            continue  # it is merged
        node = recipe.tree.get(key)
        default = field.get_default()
        if is_null(node) and key in _ROOTS:
            node = from_data([]) if _ROOTS[key].is_list else node or NULL
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Section) and key not in _ROOTS:
            node = _filled(node, field.annotation)
        elif node is None:
            node = from_data(default)
        assert node is not None
        entries[key] = Entry(Origin(), _with_settings(key, node))
    return MapNode(entries, recipe.tree.origin)


def _filled(node: Node | None, section: type[BaseModel]) -> Node:
    given = node if isinstance(node, MapNode) else MapNode()
    entries: dict[str, Entry] = {}
    for key, field in section.model_fields.items():
        value = given.get(key)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            value = _filled(value, field.annotation)
        entries[key] = Entry(Origin(), value if value is not None else from_data(field.get_default()))
    return MapNode(entries, given.origin)


def _with_settings(key: str, node: Node) -> Node:
    settings = _ROOTS[key].settings if key in _ROOTS else ()
    for setting in settings:
        if isinstance(node, MapNode) and setting not in node.entries:
            node = node.with_node(setting, NULL)
    return node


def to_shown_data(node: Node) -> Any:
    """Return the plain value, with expressions in place of what came from the environment."""
    if not isinstance(node, MapNode) and node.expression is not None:
        return node.expression
    if isinstance(node, MapNode):
        return {key: to_shown_data(entry.node) for key, entry in node.entries.items()}
    if isinstance(node, ScalarNode):
        return node.value
    return [to_shown_data(item) for item in node.items]
