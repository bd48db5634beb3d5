"""A component section of the tree to a `Target`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from hp_core.components import Component, ComponentLoadError, Components, Group
from hp_core.config.importing import (
    check_is_inner_wrapper,
    check_is_local_compute,
    check_is_loss,
    check_is_replacement,
    import_callable,
)
from hp_core.config.nested import nested_group, nested_section
from hp_core.config.node import MapNode, Node, ScalarNode, describe, is_null, nearest_origin, to_data, walk
from hp_core.config.path import Path, format_path
from hp_core.config.section import IMPORT_PATH, NAME, ComponentSection
from hp_core.config.shape import known_keys, members, unknown_keys
from hp_core.config.signature import Parameter, Signature, SignatureError, argument_adapter
from hp_core.config.target import Target
from hp_core.config.wording import problems_of, unknown_key
from hp_core.errors import InputError, Problem
from hp_core.spelling import did_you_mean, nearest

# What a component must be, for the groups where that can be told before it is built.
_CHECKS = {
    "hp.losses": check_is_loss,
    "hp.module_replacements": check_is_replacement,
    "hp.inner_wrappers": check_is_inner_wrapper,
    "hp.local_computes": check_is_local_compute,
}


def resolve_target(
    section: ComponentSection, tree: MapNode, path: Path, node: Node, components: Components
) -> tuple[Target | None, list[Problem]]:
    """Return what a section names, with its arguments checked, or None and what is wrong with it.

    `node` is the section, at `path` in `tree`. The component is imported.
    """
    resolver = _Resolver(section, tree, path, components)
    return resolver.resolve(node), resolver.problems


@dataclass
class _Resolver:
    section: ComponentSection
    tree: MapNode
    path: Path
    components: Components
    problems: list[Problem] = field(default_factory=list)

    def resolve(self, node: Node) -> Target | None:
        if not isinstance(node, MapNode):
            message = f"expected a component, got {describe(node)}"
            self.problems.append(
                Problem(message, format_path(self.path), node.origin, f"write its name, or a mapping with {NAME!r}")
            )
            return None
        key = self._naming_key(node)
        if key is None:
            return None
        loaded = self._load(key, node)
        if loaded is None:
            return None
        function, component = loaded
        spelling = str(to_data(node)[key])
        shown = _shown_name(node, key)
        try:
            signature = Signature.of(function)
        except SignatureError as error:
            self._report(f"{shown!r} {error}", (key,))
            return None
        check = _CHECKS.get(self.section.group)
        problem = check(function, signature.returns, shown) if check is not None else None
        if problem is not None:
            self._report(problem.message, (key,), problem.hint)
        given = node.without(NAME, IMPORT_PATH, *self.section.settings)
        # What is no component at all has no arguments to be wrong.
        arguments = self._arguments(given, signature, shown) if problem is None else {}
        named = {"name": spelling} if key == NAME else {"import_path": spelling}
        where = {format_path(inner): one.origin for inner, one in walk(node.without(*self.section.settings))}
        where[""] = nearest_origin(self.tree, self.path, key=True)
        return Target(
            format_path(self.path), self.section.group, component=component, arguments=arguments, origins=where, **named
        )

    def _naming_key(self, node: MapNode) -> str | None:
        """Return which of `name` and `_target_` names the component."""
        given = [key for key in (NAME, IMPORT_PATH) if not is_null(node.get(key))]
        if len(given) == 2:
            last = max(given, key=lambda key: str(list(node.entries).index(key)))
            self._report(f"{NAME!r} and {IMPORT_PATH!r} each name a component", (last,), "remove one of them", key=True)
            return None
        if not given:
            installed = ", ".join(self.components.names(self.section.group)) or "none"
            hint = f"write '{NAME}:' (installed: {installed}) or '{IMPORT_PATH}: package.module.attribute'"
            self._report("names no component", (), hint, key=True)
            return None
        value = node.get(given[0])
        if isinstance(value, ScalarNode) and isinstance(value.value, str):
            return given[0]
        if not (isinstance(value, ScalarNode) and value.problem is not None):
            assert value is not None
            self._report(f"expected text, got {describe(value)}", (given[0],))
        return None

    def _load(self, key: str, node: MapNode) -> tuple[Callable[..., Any], Component | None] | None:
        spelling = str(to_data(node)[key])
        try:
            if key == IMPORT_PATH:
                return import_callable(spelling), None
            component = self.components.find(self.section.group, spelling)
            function = component.load()
        except InputError as error:
            self._refuse(node, key, error.problems[0])
            return None
        except ComponentLoadError as error:
            self._refuse(node, key, error.problem)
            return None
        if not callable(function):
            self._report(f"{component.qualified_name!r} ({component.value}) is not callable", (key,))
            return None
        return function, component

    def _refuse(self, node: MapNode, key: str, problem: Problem) -> None:
        """Report a name or import path; where it came from the environment, without the details, which show it."""
        shown = _shown_name(node, key)
        if shown == to_data(node)[key]:
            hint = "nothing is written null" if shown.casefold() == "none" else problem.hint
            if key == NAME and "." in shown:
                hint = f"write {{{IMPORT_PATH}: {shown}}}"
            self._report(problem.message, (key,), hint)
        else:
            self._report(f"the value of {shown!r} names no component that can be imported", (key,))

    def _arguments(self, given: MapNode, signature: Signature, spelling: str) -> dict[str, Any]:
        parameters = signature.recipe_parameters(self.section.runtime_arguments)
        known = dict(parameters)
        meant: set[str | None] = set()  # what misspelt arguments probably are, which are then not missing as well
        for key in given.entries:
            if key in self.section.runtime_arguments:
                self._report("is provided by the trainer", (key,), "remove it", key=True)
            elif key not in parameters and not signature.is_open:
                choices = sorted((*parameters, *self.section.settings))
                meant.add(nearest(key, choices))
                hint = f"{did_you_mean(key, choices)} accepted: {', '.join(choices) or 'none'}".strip()
                self._report(f"unknown argument of {spelling!r}", (key,), hint, key=True)
            elif key not in parameters:
                known[key] = Parameter(key, Any, None)
        for name, parameter in parameters.items():
            if parameter.is_required and name not in given.entries and name not in meant:
                hint = f"write '{name}: …' in this section"
                self._report(f"{spelling!r} needs the argument {name!r}", (), hint, key=True)
        nested = {
            key: found for key in given.entries if key in known and (found := nested_group(known[key].annotation))
        }
        targets = self._nested(given.only(*nested), nested, known)
        return {**self._checked(given.only(*(set(known) - set(nested))), known), **targets}

    def _nested(self, given: MapNode, groups: dict[str, Group], parameters: dict[str, Parameter]) -> dict[str, Any]:
        """Return the components among the arguments."""
        targets: dict[str, Any] = {}
        for key, found in groups.items():
            node = given.entries[key].node
            if is_null(node) and type(None) in members(parameters[key].annotation):
                targets[key] = None
                continue
            if isinstance(node, ScalarNode) and isinstance(node.value, str):
                node = MapNode({}, node.origin).with_node(NAME, node)
            section = nested_section(self.section, key, found)
            target, problems = resolve_target(section, self.tree, (*self.path, key), node, self.components)
            self.problems += problems
            if target is not None:
                targets[key] = target
        return targets

    def _checked(self, given: MapNode, parameters: dict[str, Parameter]) -> dict[str, Any]:
        for key, inner in _unknown(given, parameters):
            annotation = parameters[key].annotation
            node = given.entries[key].node
            known = known_keys(annotation, inner[:-1])
            self.problems.append(unknown_key(node, inner, (*self.path, key), known))
        try:
            text = json.dumps(to_data(given))
            checked: dict[str, Any] = argument_adapter(parameters).validate_json(text, strict=True)
            return checked
        except ValidationError as error:
            for problem in problems_of(error, given, self.path, {k: p.annotation for k, p in parameters.items()}):
                if problem not in self.problems:
                    self.problems.append(problem)
            return {}

    def _report(self, message: str, inner: Path, hint: str = "", *, key: bool = False) -> None:
        path = (*self.path, *inner)
        self.problems.append(Problem(message, format_path(path), nearest_origin(self.tree, path, key=key), hint))


def _shown_name(node: MapNode, key: str) -> str:
    """Return the name or import path for a message: its expression where it came from the environment."""
    named = node.get(key)
    assert isinstance(named, ScalarNode)
    return named.expression or str(named.value)


def _unknown(given: MapNode, parameters: dict[str, Parameter]) -> Iterator[tuple[str, Path]]:
    for key, entry in given.entries.items():
        for inner in unknown_keys(parameters[key].annotation, entry.node):
            yield key, inner
