"""A recipe with everything written out: bases merged, overrides applied, defaults filled in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic.fields import FieldInfo

from hp_core.config.base import Section, section_in
from hp_core.config.loader import Recipe
from hp_core.config.models import TrainerConfig
from hp_core.config.node import NULL, Entry, ListNode, MapNode, Node, ScalarNode, from_data, is_null
from hp_core.config.section import ComponentSection, section_at
from hp_core.errors import Origin


def resolved_tree(recipe: Recipe) -> MapNode:
    """Return the recipe's tree with the default of every key that it leaves out.

    Arguments that a component section leaves out stay out; their defaults belong to the component.
    """
    entries: dict[str, Entry] = {}
    for key, field in TrainerConfig.model_fields.items():
        if key == "base":
            continue  # it is merged
        node = recipe.tree.get(key)
        named = section_at((key,))
        entries[key] = Entry(Origin(), _value(node, field) if named is None else _with_settings(named, node or NULL))
    return MapNode(entries, recipe.tree.origin)


def _value(node: Node | None, field: FieldInfo) -> Node:
    section, is_list = section_in(field.annotation)
    if section is not None and not is_list:
        return _filled(node, section)
    if section is not None and isinstance(node, ListNode):
        return replace(node, items=tuple(_filled(item, section) for item in node.items))
    if node is None or (is_list and is_null(node)):
        return from_data(field.get_default())
    return node


def _filled(node: Node | None, section: type[Section]) -> Node:
    given = node if isinstance(node, MapNode) else MapNode()
    entries = {key: Entry(Origin(), _value(given.get(key), field)) for key, field in section.recipe_keys().items()}
    return MapNode(entries, given.origin)


def _with_settings(section: ComponentSection, node: Node) -> Node:
    for setting in section.settings:
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
