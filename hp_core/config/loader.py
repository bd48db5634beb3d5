"""A recipe file, its bases, the environment and the command line to one checked recipe."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hp_core.components import Components
from hp_core.config.environment import without_quotes
from hp_core.config.models import TrainerConfig
from hp_core.config.node import ListNode, MapNode, Node, ScalarNode, find, from_data, nearest_origin, put, walk
from hp_core.config.override import apply_overrides, parse_overrides
from hp_core.config.path import Path, format_path, parse_path
from hp_core.config.section import add_defaults, spell_out
from hp_core.config.source import read_source
from hp_core.config.validate import validate
from hp_core.errors import InputError, Origin, Problem


@dataclass(frozen=True)
class Recipe:
    """A checked recipe.

    `tree` is what the configuration was made from: bases merged, overrides applied, each value with its origin.
    `files` are the recipe and its bases, in the order they were read.
    """

    path: pathlib.Path
    tree: MapNode
    config: TrainerConfig
    files: tuple[str, ...]

    def origin(self, path: str) -> Origin:
        """Return where the value at a dotted path was written, or else the section around it; a default has neither."""
        return nearest_origin(self.tree, parse_path(path)) if path else self.tree.origin

    def problem(self, path: str, message: str, hint: str = "") -> Problem:
        """Return a problem with the value at a dotted path, with its position."""
        return Problem(message, path, self.origin(path), hint)

    def with_plugins(self, names: Sequence[str]) -> Recipe:
        """Return a copy that activates these plugins.

        They are those of the list, by these names or others, and then those of the command line.
        """
        written = self.tree.get("plugins")
        old: Sequence[Node] = written.items if isinstance(written, ListNode) else ()
        before = self.config.plugins
        items = tuple(
            old[index]
            if before[index : index + 1] == [name]
            else from_data(name, old[index].origin if index < len(old) else Origin(option=f"--plugin {name}"))
            for index, name in enumerate(names)
        )
        if items == tuple(old):
            return self
        origin = written.origin if written is not None else items[0].origin
        tree = self.tree.with_node("plugins", ListNode(items, origin))
        return replace(self, tree=tree, config=self.config.model_copy(update={"plugins": list(names)}))

    def located(self, error: InputError) -> InputError:
        """Return the error with a position for each of its problems that names a value of this recipe."""
        return InputError(
            replace(problem, origin=self.origin(problem.path)) if problem.path and problem.origin is None else problem
            for problem in error.problems
        )


def load_recipe(
    path: str | pathlib.Path,
    overrides: Sequence[str] = (),
    *,
    components: Components | None = None,
    env: Mapping[str, str] | None = None,
) -> Recipe:
    """Load and check a recipe.

    `overrides` are dotted options as typed (`--training.seed=1`), in any order; `components` are those a recipe may
    name (default: the installed ones); `env` is the environment (default: the process's). Components that the
    recipe names are imported.

    Raises `InputError` with everything that is wrong, in the order of the file.
    """
    found = examine(path, overrides, components=components, env=env)
    if found.recipe is None:
        raise InputError(found.problems)
    return found.recipe


@dataclass(frozen=True)
class Examination:
    """What came of reading a recipe: the recipe, or else its problems in the order of the file.

    `tree` is as far as it got, None if a file can't be read.
    """

    recipe: Recipe | None
    tree: MapNode | None
    files: tuple[str, ...]
    problems: tuple[Problem, ...]

    def with_problems(self, problems: Iterable[Problem]) -> Examination:
        """Return a copy that has these problems as well, and therefore no recipe if there are any."""
        ordered = _in_order((*self.problems, *problems), self.files)
        return replace(self, recipe=None if ordered else self.recipe, problems=tuple(ordered))


def examine(
    path: str | pathlib.Path,
    overrides: Sequence[str] = (),
    *,
    components: Components | None = None,
    env: Mapping[str, str] | None = None,
) -> Examination:
    """Load and check a recipe as `load_recipe` does, but return its problems."""
    variables = os.environ if env is None else env
    options, problems = parse_overrides(overrides, variables)
    base = next((option.node for option in options if option.path == ("base",)), None)
    source = read_source(str(path), variables, base)
    problems += source.problems
    files = tuple(source.files)
    if source.tree is None:
        return Examination(None, None, files, tuple(_in_order(problems, files)))
    tree, found = apply_overrides(source.tree, (option for option in options if option.path != ("base",)))
    problems += found
    tree = add_defaults(_spelt_out(tree))
    tree, config, found = _validated(tree, Components.discover() if components is None else components, variables)
    problems += found
    ordered = tuple(_in_order(_concealed(problems, tree), files))
    recipe = None if ordered or config is None else Recipe(pathlib.Path(path), tree, config, files)
    return Examination(recipe, tree, files, ordered)


def _spelt_out(tree: MapNode) -> MapNode:
    spelt = spell_out(tree)
    assert isinstance(spelt, MapNode)
    return spelt


def _validated(
    tree: MapNode, components: Components, variables: Mapping[str, str]
) -> tuple[MapNode, TrainerConfig | None, list[Problem]]:
    unresolved = list(_unresolved(tree))
    config, problems = validate(tree, components)
    unquoted = tree
    for path in [parse_path(problem.path) for problem in problems if problem.path]:
        node = find(tree, path)
        value = without_quotes(node, variables) if isinstance(node, ScalarNode) else None
        unquoted = put(unquoted, path, value) if value is not None else unquoted
    if unquoted is not tree:
        config, problems = validate(unquoted, components)
    broken = {problem.path for problem in unresolved}
    return unquoted, config, unresolved + [problem for problem in problems if not _is_within(problem.path, broken)]


def _unresolved(tree: MapNode) -> Iterable[Problem]:
    """Yield the problems of values that couldn't be found out."""
    for path, node in walk(tree):
        if isinstance(node, ScalarNode) and node.problem is not None:
            yield replace(node.problem, path=format_path(path), origin=node.origin)


def _is_within(path: str, broken: set[str]) -> bool:
    steps = parse_path(path) if path else ()
    return any(format_path(steps[:length]) in broken for length in range(1, len(steps) + 1))


def _in_order(problems: Iterable[Problem], files: Sequence[str]) -> list[Problem]:
    """Return the problems by position: the recipe's, its bases', then the command line's; each once."""

    def position(problem: Problem) -> tuple[int, int, int]:
        origin = problem.origin or Origin()
        if origin.option is not None:
            return len(files), 0, 0
        rank = files.index(origin.file) if origin.file in files else -1
        return rank, origin.line or 0, origin.column or 0

    return sorted(dict.fromkeys(problems), key=position)


def _concealed(problems: Iterable[Problem], tree: MapNode) -> list[Problem]:
    """Return the problems with values from the environment replaced by their expressions.

    Only texts that come from elsewhere (an import error, a component's own validator) can hold such a value.
    """
    hidden = [
        (path, str(node.value), node.expression)
        for path, node in walk(tree)
        if isinstance(node, ScalarNode) and node.expression is not None and node.value not in (None, "")
    ]
    return [_conceal(problem, hidden) for problem in problems]


def _conceal(problem: Problem, hidden: Iterable[tuple[Path, str, str]]) -> Problem:
    steps = parse_path(problem.path) if problem.path else ()
    for path, value, expression in hidden:
        shared = min(len(path), len(steps))
        if path[:shared] == steps[:shared]:
            problem = replace(problem, message=problem.message.replace(value, expression))
    return problem
