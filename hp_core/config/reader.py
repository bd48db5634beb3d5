"""YAML 1.2 text to the located tree."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentEndEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
    StreamStartEvent,
)
from ruamel.yaml.reader import ReaderError

from hp_core.config.node import Entry, ListNode, MapNode, Node, ScalarNode
from hp_core.config.path import Path, format_path
from hp_core.config.scalar import resolve_plain
from hp_core.errors import Origin, Problem

if TYPE_CHECKING:
    from ruamel.yaml.error import StringMark

_CORE_TAG = "tag:yaml.org,2002:"
_SCALAR_TAGS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "null": (type(None),),
}
_ODD_CHARACTER = "found character "
_BLOCK_ENDS = "expected <block end>, but found "
_MERGE = "<<"
_MAX_DEPTH = 100  # what walks the tree is recursive


@dataclass(frozen=True)
class Document:
    """What a YAML text holds. `root` is None when the text can't be read at all or is empty."""

    root: Node | None
    problems: tuple[Problem, ...] = ()
    end: int = 0  # where the last value ends in the text


def read_yaml(text: str, locate: Callable[[int, int], Origin]) -> Document:
    """Read one YAML document; `locate` turns a 1-based line and column into an origin."""
    return _Reader(text, locate).read()


def read_file(path: str) -> Document:
    """Read a recipe file. What is wrong with it, its absence included, comes back as problems."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        return Document(None, (Problem(f"can't read this file: {error.strerror or error}", origin=Origin(path)),))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        column = error.start - (content.rfind(b"\n", 0, error.start) + 1) + 1
        problem = Problem("is not UTF-8 text", origin=Origin(path, line, column), hint="save the file as UTF-8")
        return Document(None, (problem,))
    return read_yaml(text, lambda line, column: Origin(path, line, column))


@dataclass
class _Reader:
    text: str
    locate: Callable[[int, int], Origin]
    problems: list[Problem] = field(default_factory=list)
    anchors: dict[str, Node] = field(default_factory=dict)
    end: int = 0

    def read(self) -> Document:
        try:
            yaml = YAML(typ="safe", pure=True)
            self.events = iter(yaml.parse(self.text))
            root = self._document()
        except YAMLError as error:
            return Document(None, (*self.problems, self._syntax_problem(error)))
        return Document(root, tuple(self.problems), self.end)

    def _document(self) -> Node | None:
        root: Node | None = None
        documents = 0
        for event in self.events:
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents == 2:
                    self._report("a second document begins here", event, hint="a recipe is one document")
                if event.version not in (None, (1, 2)):
                    self._report("recipes are YAML 1.2", event, hint="remove the %YAML line")
            elif not isinstance(event, (StreamStartEvent, StreamEndEvent, DocumentEndEvent)):
                node = self._node(event, ())
                root = node if documents == 1 else root
        return root

    def _node(self, event: Event, path: Path) -> Node:
        if len(path) > _MAX_DEPTH:
            raise MarkedYAMLError(problem="is nested too deeply", problem_mark=event.start_mark)
        if isinstance(event, AliasEvent):
            return self._alias(event, path)
        if isinstance(event, ScalarEvent):
            node: Node = self._scalar(event, path)
            if event.value or event.style:  # the mark of an absent value is where the next line begins
                self.end = event.end_mark.index
        elif isinstance(event, SequenceStartEvent):
            node = self._sequence(event, path)
        else:
            assert isinstance(event, MappingStartEvent)
            node = self._mapping(event, path)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def _alias(self, event: AliasEvent, path: Path) -> Node:
        self.end = event.end_mark.index
        if event.anchor in self.anchors:
            return self.anchors[event.anchor]
        message = f"alias '*{event.anchor}' has no anchor '&{event.anchor}' before it"
        problem = Problem(message, hint="quote a text that begins with '*'")
        return ScalarNode(None, self._origin(event), problem=problem)

    def _scalar(self, event: ScalarEvent, path: Path) -> ScalarNode:
        origin = self._origin(event)
        plain = not event.style
        node = ScalarNode(event.value, origin, event.value, plain)
        if any("\ud800" <= character <= "\udfff" for character in event.value):
            problem = Problem("holds half of a surrogate pair, not a character")
            return replace(node, value=None, text="", problem=problem)
        tag = self._tag(event)
        if tag is None:
            return self._resolve(node) if plain else node
        if tag in ("!", f"{_CORE_TAG}str"):
            return replace(node, plain=False)
        types = _SCALAR_TAGS.get(tag.removeprefix(_CORE_TAG)) if tag.startswith(_CORE_TAG) else None
        if types is None:
            return replace(node, value=None, problem=_tag_problem(tag))
        resolved = self._resolve(replace(node, plain=True))
        if type(resolved.value) not in types:
            return replace(node, value=None, problem=Problem(f"'{event.value}' is not of the type its tag says"))
        return replace(resolved, value=float(resolved.value)) if types == (int, float) else resolved  # type: ignore[arg-type]

    def _resolve(self, node: ScalarNode) -> ScalarNode:
        try:
            value = resolve_plain(node.text)
        except ValueError:
            return replace(node, value=None, problem=Problem("is a number of too many digits"))
        if isinstance(value, float) and not math.isfinite(value):
            return replace(node, value=None, problem=Problem(f"must be a finite number, got '{node.text}'"))
        return replace(node, value=value)

    def _sequence(self, event: SequenceStartEvent, path: Path) -> Node:
        items: list[Node] = []
        while not isinstance(item := next(self.events), SequenceEndEvent):
            items.append(self._node(item, (*path, len(items))))
        if event.flow_style:
            self.end = item.end_mark.index
        return self._tagged(event, "seq", ListNode(tuple(items), self._origin(event)))

    def _mapping(self, event: MappingStartEvent, path: Path) -> Node:
        entries: dict[str, Entry] = {}
        merged: dict[str, Entry] = {}
        while not isinstance(key := next(self.events), MappingEndEvent):
            name = self._key(key, path)
            if name == _MERGE and isinstance(key, ScalarEvent) and not key.style:
                merged.update(self._merge(self._node(next(self.events), (*path, _MERGE)), path))
                continue
            value = self._node(next(self.events), path if name is None else (*path, name))
            if name is None:
                continue
            origin = self._origin(key)
            if isinstance(value, ScalarNode) and value.plain and not value.text and value.problem is None:
                value = replace(value, origin=origin)  # an absent value is where its key is
            if name in entries:
                self._repeated((*path, name), entries[name].key_origin, origin)
            else:
                entries[name] = Entry(origin, value)
        if event.flow_style:  # a block ends where the next line begins
            self.end = key.end_mark.index
        inherited = {name: entry for name, entry in merged.items() if name not in entries}
        return self._tagged(event, "map", MapNode({**inherited, **entries}, self._origin(event)))

    def _key(self, event: Event, path: Path) -> str | None:
        """Return a key's text, or None if the key is no text."""
        node = self._node(event, path)
        if not isinstance(node, ScalarNode):
            self._report("a list or mapping can't be a key", event, path)
            return None
        if node.problem is not None:
            self.problems.append(replace(node.problem, path=format_path(path), origin=node.origin))
            return None
        return node.text

    def _merge(self, value: Node, path: Path) -> dict[str, Entry]:
        maps = value.items if isinstance(value, ListNode) else (value,)
        merged: dict[str, Entry] = {}
        for one in reversed(maps):
            if isinstance(one, MapNode):
                merged.update(one.entries)
            else:
                problem = getattr(one, "problem", None) or Problem("'<<' merges a mapping or a list of mappings")
                self.problems.append(replace(problem, path=format_path(path), origin=one.origin))
        return merged

    def _repeated(self, path: Path, first: Origin, second: Origin) -> None:
        where = f", first on line {first.line}" if first.line is not None else ""
        message = f"repeated key{where}"
        self.problems.append(Problem(message, format_path(path), second, hint="remove one of them"))

    def _tagged(self, event: Any, kind: str, node: Node) -> Node:
        tag = self._tag(event)
        if tag in (None, "!", f"{_CORE_TAG}{kind}"):
            return node
        return ScalarNode(None, node.origin, problem=_tag_problem(str(tag)))

    def _tag(self, event: Any) -> str | None:
        """Return the tag that was written, None if none was."""
        return None if event.tag is None else str(event.tag)

    def _origin(self, event: Event) -> Origin:
        mark: StringMark = event.start_mark
        return self.locate(mark.line + 1, mark.column + 1)

    def _report(self, message: str, event: Event, path: Path = (), hint: str = "") -> None:
        self.problems.append(Problem(message, format_path(path), self._origin(event), hint))

    def _syntax_problem(self, error: YAMLError) -> Problem:
        if isinstance(error, ReaderError):
            before = self.text[: error.position]
            origin = self.locate(before.count("\n") + 1, error.position - (before.rfind("\n") + 1) + 1)
            code = ord(self.text[error.position])
            return Problem(f"holds the character U+{code:04X}, which YAML forbids", origin=origin)
        if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
            return Problem(f"is not YAML: {error}", origin=self.locate(1, 1))
        mark = error.problem_mark
        lines = self.text.splitlines() or [""]
        line = lines[min(mark.line, len(lines) - 1)]
        message, hint = _explain(str(error.problem), line, mark, error.context_mark)
        return Problem(message, origin=self.locate(mark.line + 1, mark.column + 1), hint=hint)


def _explain(problem: str, line: str, mark: StringMark, context: StringMark | None) -> tuple[str, str]:
    """Return a message and a hint for a YAML syntax error on this line."""
    if problem.startswith(_ODD_CHARACTER):
        character = problem.removeprefix(_ODD_CHARACTER).partition(" that")[0]
        if character == r"'\t'":
            return "a tab can't indent YAML", "use spaces"
        return f"an unquoted text can't begin with {character}", "quote it"
    if "${env:" in line and ("expected ',' or" in problem or "flow" in problem):
        return problem, 'inside [ ] and { } write the expression in quotes: "${env:NAME}"'
    if problem.startswith("mapping values are not allowed"):
        return "a second ': ' in one line", "quote a text that holds ': '"
    problem = problem.replace("'<stream end>'", "the end")
    if problem.startswith(_BLOCK_ENDS):
        return f"did not expect {problem.removeprefix(_BLOCK_ENDS)} here", "check the indentation and the quotes"
    if problem == "could not find expected ':'" and context is not None:
        return f"line {context.line + 1} has no ': ' after its key", ""
    started = f" (it began on line {context.line + 1})" if context is not None and context.line != mark.line else ""
    return f"{problem}{started}", ""


def _tag_problem(tag: str) -> Problem:
    message = f"the tag '{tag.replace(_CORE_TAG, '!!')}' means nothing in a recipe"
    return Problem(message, hint="quote a text that begins with '!'")
