"""The located tree to a `TrainerConfig`, or everything that is wrong with it."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Collection, Iterator
from typing import Any

from pydantic import ValidationError

from hp_core.components import Components
from hp_core.config.base import Section, section_in
from hp_core.config.models import TrainerConfig
from hp_core.config.node import ListNode, MapNode, Node, ScalarNode, is_null, nearest_origin, put, to_data
from hp_core.config.path import Path, format_path
from hp_core.config.plan_entry import entry_problems
from hp_core.config.resolve import resolve_target
from hp_core.config.section import ComponentSection, component_nodes, is_filled, section_at, word_problems
from hp_core.config.target import Target
from hp_core.config.wording import problems_of
from hp_core.errors import Problem

# Where a section holds a component and settings, the key under which its model has the component.
_COMPONENT_KEYS = {"dataset": "source", "dataloader": "loader"}


def validate(tree: MapNode, components: Components) -> tuple[TrainerConfig | None, list[Problem]]:
    """Return the configuration, or None and all problems. Imports the components and types that the tree names."""
    tree, later = _without_later(tree.without("base"))
    words = list(word_problems(tree))
    problems = [*later.values(), *entry_problems(tree), *words]
    tree = tree.without(*(problem.path for problem in words))
    targets: dict[str, Target] = {}
    for section, path, node in component_nodes(tree):
        target, found = resolve_target(section, tree, path, node, components)
        problems += found
        targets[format_path(path)] = target or Target(format_path(path), section.group)
    config = None
    try:
        config = TrainerConfig.model_validate_json(json.dumps(_core_data(tree)), context=targets)
    except ValidationError as error:
        problems += problems_of(error, tree, (), TrainerConfig, _elsewhere())
    problems += _conflicts(tree, {path[:-1] for path in later})
    return (None if problems else config), problems


def _sections(section: type[Section], node: Node, path: Path = ()) -> Iterator[tuple[type[Section], Path, MapNode]]:
    """Yield each group of keys in a value of this section, itself first, with its path."""
    if not isinstance(node, MapNode):
        return
    yield section, path, node
    for key, field in section.recipe_keys().items():
        below = node.get(key)
        inner, is_list = section_in(field.annotation)
        if below is None or inner is None:
            continue
        if isinstance(below, ListNode) and is_list:
            for index, item in enumerate(below.items):
                yield from _sections(inner, item, (*path, key, index))
        elif not is_list:
            # A section whose every line is a comment is null.
            yield from _sections(inner, MapNode() if is_null(below) else below, (*path, key))


def _without_later(tree: MapNode) -> tuple[MapNode, dict[Path, Problem]]:
    """Return the tree without the keys that this version doesn't implement, and a problem for each that has content."""
    problems: dict[Path, Problem] = {}
    version = importlib.metadata.version("hyperparallel")
    for section, path, node in _sections(TrainerConfig, tree):
        for key in section.LATER:
            entry = node.entries.get(key)
            if entry is not None and not is_null(entry.node) and to_data(entry.node) not in ({}, []):
                inner = (*path, key)
                message = f"not supported by version {version} yet"
                problems[inner] = Problem(message, format_path(inner), entry.key_origin, "remove it")
        if node.entries.keys() & section.LATER:
            tree = put(tree, path, node.without(*section.LATER))
    return tree, problems


def _conflicts(tree: MapNode, unclear: Collection[Path]) -> Iterator[Problem]:
    """Yield what is wrong with the values of each section together.

    The sections at the `unclear` paths are left alone, and those with an unknown key, which may be a misspelling of
    what seems to be missing, or with a value that couldn't be found out.
    """
    for section, path, node in _sections(TrainerConfig, tree):
        values = [entry.node for entry in node.entries.values()]
        unresolved = any(isinstance(value, ScalarNode) and value.problem is not None for value in values)
        if path in unclear or unresolved or not node.entries.keys() <= section.recipe_keys().keys():
            continue
        for conflict in section.conflicts(to_data(node)):
            inner = (*path, *conflict.key.split(".")) if conflict.key else path
            origin = nearest_origin(tree, inner, key=True)
            yield Problem(conflict.message, format_path(inner), origin, conflict.hint)


def _core_data(tree: MapNode) -> dict[str, Any]:
    """Return the tree as data in which the key of its target stands for each component."""
    data: dict[str, Any] = {}
    for key, entry in tree.entries.items():
        field = TrainerConfig.model_fields.get(key)
        if field is None or not is_null(entry.node):
            data[key] = _data(entry.node, (key,))
        elif section_at((key,)) is None and section_in(field.annotation) == (field.annotation, False):
            data[key] = {}  # a section whose every line is a comment
    return data


def _data(node: Node, path: Path) -> Any:
    section = section_at(path)
    if section is not None and is_filled(section, node):
        return _stand_in(section, node, path)
    if isinstance(node, MapNode):
        return {key: _data(entry.node, (*path, key)) for key, entry in node.entries.items()}
    if isinstance(node, ListNode):
        return [_data(item, (*path, index)) for index, item in enumerate(node.items)]
    return node.value


def _stand_in(section: ComponentSection, node: Node, path: Path) -> Any:
    key = format_path(path)
    if not section.settings:
        return key
    filled = [one for one in section.settings if isinstance(node, MapNode) and not is_null(node.get(one))]
    return {_COMPONENT_KEYS[key]: key, **{one: f"{key}.{one}" for one in filled}}


def _elsewhere() -> dict[str, str]:
    """Return the path of each key that belongs to one section only, for keys written in a wrong place."""
    paths: dict[str, list[str]] = {}
    for name, field in TrainerConfig.model_fields.items():
        section, is_list = section_in(field.annotation)
        for key in section.recipe_keys() if section is not None else ():
            paths.setdefault(key, []).append(f"{name}[0].{key}" if is_list else f"{name}.{key}")
    return {key: found[0] for key, found in paths.items() if len(found) == 1}
