"""Which places of a recipe name a component, and how one is recognised there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hp_core.components import GROUPS
from hp_core.config.node import ListNode, MapNode, Node, ScalarNode, descend, describe, from_data, is_null
from hp_core.config.path import ITEM, Path, pattern_of
from hp_core.errors import Origin, Problem
from hp_core.spelling import did_you_mean

NAME = "name"
IMPORT_PATH = "_target_"


@dataclass(frozen=True)
class ComponentSection:
    """A place that names a component.

    `pattern` says where it is: the steps of its path, `ITEM` for every item of a list (`trackers`, `ITEM`);
    `default` is the component when the recipe names none; `settings` are keys inside the section that belong to the
    recipe rather than to the component.
    """

    pattern: Path
    group: str
    runtime_arguments: tuple[str, ...]
    default: str | None = None
    settings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What the section is called wherever it is (`trackers`, `plan_overrides.replace_module`)."""
        return ".".join(step for step in self.pattern if isinstance(step, str))

    @property
    def root(self) -> str:
        """The root key that it is under."""
        return str(self.pattern[0])

    @property
    def is_root(self) -> bool:
        """Whether a root key names the component."""
        return len(self.pattern) == 1

    @property
    def is_item(self) -> bool:
        """Whether the items of a list name the components."""
        return self.pattern[-1] == ITEM


_DEFAULTS = {"trainer": "text", "dataloader": "torch"}
_SETTINGS = {"dataset": ("tokenizer",), "dataloader": ("collate_fn",)}
_LISTS = ("trackers", "plan_overrides")


def _pattern(name: str) -> Path:
    keys = name.split(".")
    return tuple(step for key in keys for step in ((key, ITEM) if key in _LISTS else (key,)))


SECTIONS: tuple[ComponentSection, ...] = tuple(
    ComponentSection(
        _pattern(group.section),
        group.name,
        group.runtime_arguments,
        _DEFAULTS.get(group.section),
        _SETTINGS.get(group.section, ()),
    )
    for group in GROUPS
)
_BY_PATTERN = {section.pattern: section for section in SECTIONS}

# Words that a root key may have in the place of a whole section, and what they stand for.
WORDS: Mapping[str, Mapping[str, Mapping[str, str | None]]] = {
    "mixed_precision": {
        "bf16": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
        "fp32": {"param_dtype": None, "reduce_dtype": None},
    }
}


def section_at(path: Path) -> ComponentSection | None:
    """Return the component section that is at a path, if one is."""
    return _BY_PATTERN.get(pattern_of(path))


def component_nodes(tree: MapNode) -> Iterator[tuple[ComponentSection, Path, Node]]:
    """Yield each component section that the tree fills, with its path and node."""
    for section in SECTIONS:
        for path, node in places(tree, section.pattern):
            if is_filled(section, node):
                yield section, path, node


def is_filled(section: ComponentSection, node: Node) -> bool:
    """Whether a component section says something. A null does only as the item of a list, where it is an error."""
    return section.is_item or not is_null(node)


def places(node: Node, pattern: Path, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield each value whose path fits the pattern, with its path."""
    if not pattern:
        yield path, node
    elif pattern[0] == ITEM:
        for index, item in enumerate(node.items if isinstance(node, ListNode) else ()):
            yield from places(item, pattern[1:], (*path, index))
    elif (below := descend(node, pattern[0])) is not None:
        yield from places(below, pattern[1:], (*path, pattern[0]))


def spell_out(node: Node, path: Path = ()) -> Node:
    """Return the tree with each component that is written as a bare name, and each section as a word, as a mapping."""
    words = WORDS.get(str(path[0]), {}) if len(path) == 1 else {}
    if isinstance(node, ScalarNode) and isinstance(node.value, str) and node.value in words:
        return from_data(words[node.value], node.origin)
    if section_at(path) is not None and isinstance(node, ScalarNode) and isinstance(node.value, str):
        return MapNode({}, node.origin).with_node(NAME, node)
    if isinstance(node, MapNode):
        for key, entry in node.entries.items():
            spelt = spell_out(entry.node, (*path, key))
            node = node if spelt is entry.node else node.with_node(key, spelt)
        return node
    if isinstance(node, ListNode):
        items = tuple(spell_out(item, (*path, index)) for index, item in enumerate(node.items))
        return ListNode(items, node.origin, node.expression)
    return node


def word_problems(tree: MapNode) -> Iterator[Problem]:
    """Yield a problem for each text in the place of a section that is none of its words."""
    for key, words in WORDS.items():
        node = tree.get(key)
        if isinstance(node, ScalarNode) and node.problem is None and not is_null(node):
            hint = did_you_mean(str(node.value), words)
            if node.value in ("fp16", "float16", "half"):
                hint = "fp16 needs a scaled loss, which isn't supported; bf16 doesn't"
            message = f"expected {', '.join(map(repr, words))} or a mapping, got {describe(node)}"
            yield Problem(message, key, node.origin, hint)


def add_defaults(tree: MapNode) -> MapNode:
    """Return the tree with the default component of each section that has one and doesn't name any."""
    for section in SECTIONS:
        if section.default is None:
            continue
        key = section.root
        given = tree.get(key)
        node = MapNode() if given is None or is_null(given) else given
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
