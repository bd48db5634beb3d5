"""The located tree to a `TrainerConfig`, or everything that is wrong with it."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from hp_core.components import Components
from hp_core.config.models import RESERVED_KEYS, Section, TrainerConfig
from hp_core.config.node import ListNode, MapNode, Node, find, is_null, nearest_origin, to_data
from hp_core.config.path import Path, format_path
from hp_core.config.resolve import resolve_target
from hp_core.config.section import SECTIONS, ComponentSection
from hp_core.config.target import Target
from hp_core.config.wording import problems_of
from hp_core.errors import Problem

# Where a section holds a component and settings, the key under which its model has the component.
_COMPONENT_KEYS = {"dataset": "source", "dataloader": "loader"}


def validate(tree: MapNode, components: Components) -> tuple[TrainerConfig | None, list[Problem]]:
    """Return the configuration, or None and all problems. Imports the components that the tree names."""
    problems = list(_reserved(tree))
    tree = tree.without("base", *RESERVED_KEYS)
    targets: dict[str, Target] = {}
    for section, path, node in component_nodes(tree):
        target, found = resolve_target(section, tree, path, node, components)
        problems += found
        targets[format_path(path)] = target or Target(format_path(path), section.group)
    try:
        config = TrainerConfig.model_validate_json(json.dumps(_core_data(tree)), context=targets)
    except ValidationError as error:
        problems += problems_of(error, tree, (), TrainerConfig, _elsewhere())
        problems += _cross_checks(tree, error)
        return None, problems
    return (None if problems else config), problems


def component_nodes(tree: MapNode) -> Iterator[tuple[ComponentSection, Path, Node]]:
    """Yield each component section that the tree fills, with its path and node."""
    for section in SECTIONS:
        node = find(tree, section.path)
        if node is None or is_null(node):
            continue
        if not section.is_list:
            yield section, section.path, node
        elif isinstance(node, ListNode):
            for index, item in enumerate(node.items):
                yield section, (*section.path, index), item


def _reserved(tree: MapNode) -> Iterator[Problem]:
    for key in RESERVED_KEYS:
        node = tree.get(key)
        if node is None or is_null(node) or to_data(node) in ({}, []):
            continue
        version = importlib.metadata.version("hyperparallel")
        yield Problem(f"not supported by version {version} yet", key, tree.entries[key].key_origin, "remove it")


def _core_data(tree: MapNode) -> dict[str, Any]:
    """Return the tree as data in which the key of its target stands for each component."""
    data: dict[str, Any] = {}
    roots = {section.path[0]: section for section in SECTIONS if len(section.path) == 1}
    for key, entry in tree.entries.items():
        if is_null(entry.node):
            if key in TrainerConfig.model_fields and key not in roots and key not in ("output_dir", "base"):
                data[key] = [] if key == "plugins" else {}  # a section whose every line is a comment
        elif key not in roots:
            data[key] = to_data(entry.node)
        elif roots[key].is_list:
            is_list = isinstance(entry.node, ListNode)
            data[key] = [f"{key}[{i}]" for i in range(len(entry.node.items))] if is_list else to_data(entry.node)  # type: ignore[union-attr]
        elif roots[key].settings:
            settings = {one: f"{key}.{one}" for one in roots[key].settings if not is_null(find(entry.node, (one,)))}
            data[key] = {_COMPONENT_KEYS[key]: key, **settings}
        else:
            data[key] = key
    return data


def _cross_checks(tree: MapNode, error: ValidationError) -> Iterator[Problem]:
    """Yield what pydantic doesn't check in a section that has other errors: its values together.

    A section with an unknown key is left alone: the key may be a misspelling of what seems to be missing.
    """
    kinds: dict[Any, set[str]] = {}
    for details in error.errors():
        kinds.setdefault(details["loc"][0] if details["loc"] else None, set()).add(details["type"])
    for key, field in TrainerConfig.model_fields.items():
        node = tree.get(key)
        section = field.annotation
        found = kinds.get(key, {"cross_check"})
        if found & {"cross_check", "extra_forbidden"} or not isinstance(node, MapNode):
            continue
        if isinstance(section, type) and issubclass(section, Section):
            message = section.cross_check(to_data(node))
            if message is not None:
                yield Problem(message, key, nearest_origin(tree, (key,), key=True))


def _elsewhere() -> dict[str, str]:
    """Return the path of each key that belongs to one section only, for keys written in a wrong place."""
    paths: dict[str, list[str]] = {}
    for name, field in TrainerConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            for key in field.annotation.model_fields:
                paths.setdefault(key, []).append(f"{name}.{key}")
    return {key: found[0] for key, found in paths.items() if len(found) == 1}
