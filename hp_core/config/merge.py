"""`base`: one recipe laid over another. Maps merge, everything else replaces."""

from __future__ import annotations

from hp_core.config.node import Entry, MapNode, Node
from hp_core.config.path import Path
from hp_core.config.section import names_another, section_at


def lay_over(base: MapNode, top: MapNode, path: Path = ()) -> MapNode:
    """Return `base` with `top` laid over it. Bare component names must be spelt out in both.

    A component section that names another component than the base's drops the base's arguments.
    """
    section = section_at(path)
    if section is not None and names_another(section, base, top):
        base = base.only(*section.settings)
    entries = dict(base.entries)
    for key, entry in top.entries.items():
        old = entries.get(key)
        entries[key] = Entry(entry.key_origin, _merged(old.node, entry.node, (*path, key)) if old else entry.node)
    return MapNode(entries, top.origin)


def _merged(base: Node, top: Node, path: Path) -> Node:
    if isinstance(base, MapNode) and isinstance(top, MapNode):
        return lay_over(base, top, path)
    return top
