"""Which places of a recipe name a component, and how one is recognised there."""

from __future__ import annotations

from dataclasses import dataclass

from hp_core.components import GROUPS
from hp_core.config.node import ListNode, MapNode, Node, ScalarNode
from hp_core.config.path import Path
from hp_core.errors import Origin

NAME = "name"
IMPORT_PATH = "_target_"


@dataclass(frozen=True)
class ComponentSection:
    """A place that names a component.

    `path` is where it is (for a list: where the list is); `default` is the component when the recipe names none;
    `settings` are keys inside the section that belong to the recipe rather than to the component.
    """

    path: tuple[str, ...]
    group: str
    runtime_arguments: tuple[str, ...]
    is_list: bool = False
    default: str | None = None
    settings: tuple[str, ...] = ()


_DEFAULTS = {"trainer": "text", "dataloader": "torch"}
_SETTINGS = {"dataset": ("tokenizer",), "dataloader": ("collate_fn",)}
_LISTS = ("trackers",)
# Sections of keys that this version doesn't implement.
_LATER = ("plan_overrides",)

SECTIONS: tuple[ComponentSection, ...] = tuple(
    ComponentSection(
        tuple(group.section.split(".")),
        group.name,
        group.runtime_arguments,
        group.section in _LISTS,
        _DEFAULTS.get(group.section),
        _SETTINGS.get(group.section, ()),
    )
    for group in GROUPS
    if not group.section.startswith(_LATER)
)
_BY_PATH = {section.path: section for section in SECTIONS}


def section_at(path: Path) -> ComponentSection | None:
    """Return the component section that is at a path, if one is."""
    if path and isinstance(path[-1], int):
        section = _BY_PATH.get(path[:-1])  # type: ignore[arg-type]
        return section if section is not None and section.is_list else None
    section = _BY_PATH.get(path)  # type: ignore[arg-type]
    return None if section is not None and section.is_list else section


def spell_out(node: Node, path: Path = ()) -> Node:
    """Return the tree with each component that is written as a bare name written as `{name: …}`."""
    if section_at(path) is not None and isinstance(node, ScalarNode) and isinstance(node.value, str):
        return MapNode({}, node.origin).with_node(NAME, node)
    if isinstance(node, MapNode):
        for key, entry in node.entries.items():
            spelt = spell_out(entry.node, (*path, key))
            node = node if spelt is entry.node else node.with_node(key, spelt)
        return node
    if isinstance(node, ListNode) and path in _BY_PATH:
        items = tuple(spell_out(item, (*path, index)) for index, item in enumerate(node.items))
        return ListNode(items, node.origin, node.expression)
    return node


def add_defaults(tree: MapNode) -> MapNode:
    """Return the tree with the default component of each section that has one and doesn't name any."""
    for section in SECTIONS:
        if section.default is None:
            continue
        key = section.path[0]
        node = tree.get(key) or MapNode()
        if isinstance(node, MapNode) and NAME not in node.entries and IMPORT_PATH not in node.entries:
            name = ScalarNode(section.default, Origin(), section.default)
            named = MapNode({}, node.origin).with_node(NAME, name)
            tree = tree.with_node(key, MapNode({**named.entries, **node.entries}, node.origin))
    return tree


def names_another(section: ComponentSection, old: MapNode, new: MapNode) -> bool:
    """Say whether `new`, which is laid over `old`, names another component than `old` does."""
    before, after = _identity(old, section.default), _identity(new, None)
    if before is None or after is None or before == after:
        return False
    if before[0] != after[0] or before[0] == IMPORT_PATH:
        return True
    # `adamw` and `hyperparallel:adamw` are one component; two packages are two.
    packages = {name.rpartition(":")[0] for _, name in (before, after)}
    bare = {name.rpartition(":")[2] for _, name in (before, after)}
    return len(bare) > 1 or "" not in packages


def _identity(node: MapNode, default: str | None) -> tuple[str, str] | None:
    for key in (NAME, IMPORT_PATH):
        named = node.get(key)
        if isinstance(named, ScalarNode) and named.value is not None:
            return key, str(named.value)
    return None if default is None else (NAME, default)
