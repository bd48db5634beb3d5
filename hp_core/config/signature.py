"""What a callable accepts, with its annotations resolved."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from typing_extensions import NotRequired, TypedDict

from hp_core.config.shape import members

_STRICT = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)
EMPTY = inspect.Signature.empty


class SignatureError(TypeError):
    """A callable can't be called with keyword arguments that are known beforehand."""


@dataclass(frozen=True)
class Parameter:
    """A parameter that can be given by name. `annotation` is `Any` where there is none; `default` may be `EMPTY`."""

    name: str
    annotation: Any
    default: Any

    @property
    def is_required(self) -> bool:
        """Whether a call must give it."""
        return self.default is EMPTY


@dataclass(frozen=True)
class Signature:
    """The parameters of a callable. `is_open` says that it takes any others too, as `**kwargs`."""

    parameters: Mapping[str, Parameter]
    is_open: bool
    returns: Any

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Signature:
        """Read a callable's signature. Raises `SignatureError` if it has none, or a positional-only parameter."""
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            raise SignatureError("has no signature to check arguments against") from None
        if isinstance(function, type) and _builds_without_arguments(function):
            return cls({}, False, EMPTY)
        hints = _hints(function)
        parameters: dict[str, Parameter] = {}
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is EMPTY:
                raise SignatureError(f"has the positional-only parameter {name!r}, which a recipe can't give")
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                parameters[name] = Parameter(name, _annotation(parameter, hints), parameter.default)
        is_open = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
        returns = hints.get("return", signature.return_annotation)
        return cls(parameters, is_open, EMPTY if isinstance(function, type) else returns)

    def accepted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the arguments that the callable takes."""
        return {name: value for name, value in arguments.items() if self.is_open or name in self.parameters}

    def recipe_parameters(self, runtime_arguments: Iterable[str]) -> dict[str, Parameter]:
        """Return the parameters that a recipe can write, given those that the trainer provides."""
        runtime = frozenset(runtime_arguments)
        return {name: one for name, one in self.parameters.items() if name not in runtime}


def _builds_without_arguments(function: type) -> bool:
    """Whether a class leaves its construction to torch's `nn.Module`, which takes anything only to refuse it later."""
    owner = next(base for base in function.__mro__ if "__init__" in vars(base))
    return (owner.__module__, owner.__qualname__) == ("torch.nn.modules.module", "Module")


def argument_adapter(parameters: Mapping[str, Parameter]) -> TypeAdapter[Any]:
    """Return a strict validator for a mapping of arguments; none is required, and no default is filled in.

    An annotation that pydantic can't check accepts anything.
    """
    fields = {name: NotRequired[one.annotation] for name, one in parameters.items()}
    try:
        return _adapter(fields)
    except Exception:  # pydantic has no common class for what it raises on an annotation it can't read
        checked = {name: field if _is_checkable(field) else NotRequired[Any] for name, field in fields.items()}
        return _adapter(checked)


def _adapter(fields: Mapping[str, Any]) -> TypeAdapter[Any]:
    # A typed dict, unlike a model, allows any parameter name and tells given arguments from defaults.
    make: Any = TypedDict
    arguments = make("arguments", dict(fields))
    arguments.__pydantic_config__ = _STRICT
    return TypeAdapter(arguments)


def _is_checkable(field: Any) -> bool:
    try:
        _adapter({"value": field})
    except Exception:
        return False
    return True


def _annotation(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> Any:
    annotation = hints.get(parameter.name, parameter.annotation)
    if annotation is EMPTY or isinstance(annotation, str):
        return Any
    if parameter.default is None and not {Any, None, type(None)} & set(members(annotation)):
        # A default of None says that None is a value, whether or not the annotation does.
        return typing.Optional[annotation]  # noqa: UP045 -- `|` refuses string annotations and some classes
    return annotation


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a callable's annotations with those that can't be resolved (names for type checkers only) left out."""
    if hasattr(function, "__pydantic_fields__"):
        return {}  # a pydantic model's signature holds the resolved annotations of its fields
    source = _annotated(function)
    try:
        return typing.get_type_hints(source, include_extras=True)
    except Exception:
        return {
            name: value
            for name, annotation in getattr(source, "__annotations__", {}).items()
            if (value := _evaluate(annotation, source)) is not None
        }


def _evaluate(annotation: Any, source: Any) -> Any:
    holder = types.SimpleNamespace(__annotations__={"value": annotation})
    try:
        return typing.get_type_hints(holder, getattr(source, "__globals__", {}), include_extras=True)["value"]
    except Exception:
        return None


def _annotated(function: Any) -> Any:
    """Return the function object that carries a callable's annotations."""
    if isinstance(function, functools.partial):
        return _annotated(function.func)
    if isinstance(function, type):
        return inspect.unwrap(function.__new__ if function.__init__ is object.__init__ else function.__init__)  # type: ignore[misc]
    if isinstance(function, types.MethodType):
        return inspect.unwrap(function.__func__)
    if inspect.isroutine(function):
        return inspect.unwrap(function)
    return inspect.unwrap(type(function).__call__)
