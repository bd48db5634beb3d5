"""A recipe with its plugins, checked in one go: what `check` reports and what training starts from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hp_core.errors import InputError, Problem

if TYPE_CHECKING:
    from hp_core.config import Recipe
    from hp_core.config.node import MapNode


def checked_recipe(
    path: str,
    overrides: Sequence[str],
    extra_plugins: Sequence[str] = (),
    world_size: int | None = None,
    *,
    with_class: bool = False,
) -> Recipe:
    """Load the recipe, try its plugins, and fit its sizes to the processes.

    Args:
        path: the recipe file.
        overrides: dotted options, as typed.
        extra_plugins: plugins named on the command line besides the recipe's.
        world_size: the processes there are; without it, those that the recipe would start.
        with_class: ask the model's class for the values that the recipe leaves to it, which imports transformers.

    Raises `InputError` with every problem.
    """
    from hp_core.config.loader import examine
    from hp_core.config.peft import missing_library
    from hp_core.parallel.known import full_config
    from hp_core.parallel.sizes import check_sizes

    found = examine(path, overrides)
    if found.tree is not None:
        base_dir = Path(path).resolve().parent
        found = found.with_problems(_plugin_problems(found.tree, extra_plugins, base_dir))
    if found.recipe is None:
        raise InputError(found.problems)
    try:
        config = found.recipe.config
        if problem := missing_library(config.peft):
            raise InputError(problem)
        check_sizes(
            config, world_size or config.launch.num_processes, full_config(config.model) if with_class else None
        )
    except InputError as error:
        raise found.recipe.located(error) from error
    return found.recipe


def _plugin_problems(tree: MapNode, extra: Sequence[str], base_dir: Path) -> Sequence[Problem]:
    from hp_core.config.node import ListNode, ScalarNode
    from hp_core.plugins import load_plugins

    plugins = tree.get("plugins")
    items = plugins.items if isinstance(plugins, ListNode) else ()
    nodes = {
        index: node for index, node in enumerate(items) if isinstance(node, ScalarNode) and isinstance(node.value, str)
    }
    if len(nodes) < len(items):
        return ()  # it is wrong already, and the places of the rest would be, too
    names = [str(node.value) for node in nodes.values()]
    origins = {f"plugins[{index}]": node.origin for index, node in nodes.items()}
    try:
        load_plugins([*names, *extra], origins=origins, base_dir=base_dir)
    except InputError as error:
        return error.problems
    return ()
