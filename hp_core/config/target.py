"""A target: a component or importable callable with its recipe arguments, not yet built."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from hp_core.components import Component
from hp_core.config.importing import import_callable
from hp_core.config.path import format_path, parse_path
from hp_core.config.signature import Signature
from hp_core.errors import ArgumentError, InputError, Origin, Problem


@dataclass(frozen=True)
class Target:
    """What a component section of a recipe says.

    Exactly one of `name` (an entry point, found as `component`) and `import_path` is set. `arguments` are the
    section's other keys, checked and converted to the callable's annotations; defaults are not copied into them.
    `origins` says where each value of the section was written, by its path inside the section (`groups[0].lr`);
    the section itself is `""`. Two targets are equal if they build the same, wherever they were written.
    """

    section: str
    group: str
    name: str | None = None
    import_path: str | None = None
    component: Component | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", MappingProxyType(dict(self.arguments)))
        object.__setattr__(self, "origins", MappingProxyType(dict(self.origins)))

    def __hash__(self) -> int:
        return hash((self.section, self.group, self.name, self.import_path))

    def __reduce__(self) -> tuple[type[Target], tuple[Any, ...]]:
        fixed = (self.section, self.group, self.name, self.import_path, self.component)
        return Target, (*fixed, dict(self.arguments), dict(self.origins))

    def __repr__(self) -> str:
        # Argument values may come from the environment, which is never printed.
        return f"Target({self.section}: {self.spelling}({', '.join(self.arguments)}))"

    @property
    def spelling(self) -> str:
        """The component as the recipe names it."""
        return self.name or self.import_path or ""

    def nested(self) -> Iterator[Target]:
        """Yield the components among the arguments, and those among theirs."""
        for value in self.arguments.values():
            if isinstance(value, Target):
                yield value
                yield from value.nested()

    def load(self) -> Callable[..., Any]:
        """Return the class or function. Raises `ComponentLoadError` or `InputError` if it can't be imported."""
        if self.component is not None:
            loaded: Callable[..., Any] = self.component.load()
            return loaded
        return import_callable(self.import_path or "")

    def build(self, **runtime: Any) -> Any:
        """Call the callable with the recipe's arguments and those of `runtime` that it declares.

        A callable with `**kwargs` gets all of `runtime`. Each call gets its own copy of the arguments. Raises
        `InputError`, with the position in the recipe, where the callable raises `ArgumentError`; any other
        exception passes through.
        """
        function, signature = self._loaded
        passed = signature.accepted(runtime)
        try:
            return function(**copy.deepcopy(dict(self.arguments)), **passed)
        except ArgumentError as error:
            raise InputError(self.problem(error.path, error.message, error.hint)) from error

    @cached_property
    def _loaded(self) -> tuple[Callable[..., Any], Signature]:
        """The callable and what it takes: one target may build hundreds of modules."""
        function = self.load()
        return function, Signature.of(function)

    def origin(self, path: str = "") -> Origin:
        """Return where a value of the section was written, or else the innermost value around it that was."""
        try:
            steps = parse_path(path) if path else ()
        except ValueError:
            steps = ()
        for length in range(len(steps), -1, -1):
            found = self.origins.get(format_path(steps[:length]))
            if found is not None:
                return found
        return Origin()

    def problem(self, path: str, message: str, hint: str = "") -> Problem:
        """Return a problem with a value of the section, `path` being the path inside it."""
        separator = "." if path and not path.startswith("[") else ""
        return Problem(message, f"{self.section}{separator}{path}", self.origin(path), hint)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A field of this type takes a `Target`, or the key of one in the validation context."""

        def validate(value: Any, info: core_schema.ValidationInfo[Any]) -> Any:
            if isinstance(value, Target):
                return value
            if isinstance(value, str) and info.context is not None and value in info.context:
                return info.context[value]
            raise PydanticCustomError("target_type", "needs a component")

        return core_schema.with_info_plain_validator_function(validate)
