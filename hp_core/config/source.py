"""Recipe files and the bases they start from, as one tree."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hp_core.config.environment import resolve_environment
from hp_core.config.merge import lay_over
from hp_core.config.node import MapNode, Node, ScalarNode, describe, is_null
from hp_core.config.reader import read_file
from hp_core.config.section import spell_out
from hp_core.errors import Origin, Problem

_BASE = "base"
_IGNORED_PREFIX = "x-"


@dataclass
class Source:
    """The files of a recipe in the order they were read, the recipe itself first, and what is wrong with them.

    `tree` is None when a file can't be read, so that there is nothing to check.
    """

    tree: MapNode | None = None
    files: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def read_source(path: str, variables: Mapping[str, str], base: Node | None = None) -> Source:
    """Read a recipe and its bases. `base`, from the command line, is used in place of the recipe's own."""
    source = Source()
    source.tree = _read(path, variables, source, (), base)
    return source


def _read(
    path: str, variables: Mapping[str, str], source: Source, chain: tuple[str, ...], base: Node | None
) -> MapNode | None:
    source.files.append(path)
    document = read_file(path)
    source.problems += document.problems
    if document.root is None:
        if not document.problems:
            source.problems.append(Problem("is empty", origin=Origin(path), hint="a recipe is a mapping of keys"))
        return None
    if not isinstance(document.root, MapNode):
        message = f"a recipe is a mapping of keys, this is {describe(document.root)}"
        source.problems.append(Problem(message, origin=document.root.origin))
        return None
    ignored = [key for key in document.root.entries if key.startswith(_IGNORED_PREFIX)]
    tree = spell_out(resolve_environment(document.root.without(*ignored), variables))
    assert isinstance(tree, MapNode)
    node = base if base is not None else tree.get(_BASE)
    if node is None or is_null(node):
        return tree.without(_BASE)
    directory = "" if base is not None else os.path.dirname(path)
    below = _read_base(node, directory, variables, source, (*chain, path))
    return None if below is None else lay_over(below, tree.without(_BASE))


def _read_base(
    node: Node, directory: str, variables: Mapping[str, str], source: Source, chain: tuple[str, ...]
) -> MapNode | None:
    if not isinstance(node, ScalarNode) or not isinstance(node.value, str) or not node.value:
        problem = node.problem if isinstance(node, ScalarNode) and node.problem else None
        problem = problem or Problem(f"expected the path of a recipe, got {describe(node)}")
        source.problems.append(replace(problem, path=_BASE, origin=node.origin))
        return None
    path = os.path.normpath(os.path.join(directory, node.value))
    if os.path.realpath(path) in [os.path.realpath(one) for one in chain]:
        links = " -> ".join(os.path.basename(one) for one in (*chain, path))
        source.problems.append(Problem(f"the bases form a cycle: {links}", _BASE, node.origin))
        return None
    if not os.path.isfile(path):
        shown = node.expression or path
        source.problems.append(Problem(f"there is no file '{shown}'", _BASE, node.origin))
        return None
    return _read(path, variables, source, chain, None)
