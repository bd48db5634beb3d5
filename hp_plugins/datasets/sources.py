"""Named sources of a data set, as a recipe writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from hp_core.data.build import Part
from hp_core.data.hub import HubSource
from hp_core.data.megatron import MegatronSource, expand_megatron
from hp_core.data.records import Source
from hp_core.data.sources import FileSource, expand_files
from hp_core.errors import ArgumentError

Files = Annotated[
    str | list[str] | None,
    Field(description="Paths, folders or globs of .txt, .jsonl, .json, .csv, .parquet and .arrow files."),
]
HubId = Annotated[str | None, Field(description="A data set on the Hub, instead of files.")]
HubConfig = Annotated[str | None, Field(description="Configuration of the Hub data set.")]
Split = Annotated[str | None, Field(description="Split of the Hub data set; null is `train`.")]
Megatron = Annotated[
    str | list[str] | None,
    Field(description="Token files of Megatron instead of files: paths without .bin and .idx, or globs of .bin."),
]
TextField = Annotated[str | None, Field(description="The field of a row that is the text; null is `text`.")]
Template = Annotated[str | None, Field(description="A text made of several fields, such as `{question} {answer}`.")]
Temperature = Annotated[
    Annotated[float, Field(gt=0)] | None,
    Field(description="Draw from a source of n rows in proportion to n ** (1 / temperature), instead of weights."),
]

_NAME = re.compile(r"[\w-]+")


class SourceSpec(BaseModel):
    """Where the rows of one source are, how much of an epoch they make up, and what their targets count for."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    files: Files = None
    hub_id: HubId = None
    hub_config: HubConfig = None
    split: Split = None
    weight: Annotated[
        Annotated[float, Field(gt=0)] | None,
        Field(description="Share of an epoch's rows, relative to the other sources; null with all: their sizes."),
    ] = None
    loss_weight: Annotated[float, Field(gt=0, description="What each target of this source counts for.")] = 1.0


Spec = TypeVar("Spec", bound=SourceSpec)


class TextSource(SourceSpec):
    """A source of texts."""

    megatron: Megatron = None
    field: TextField = None
    template: Template = None


def parts_of(
    kind: type[Spec],
    sources: Mapping[str, Spec] | None,
    temperature: float | None,
    alone: Mapping[str, Any],
    make: Callable[[str, Spec, str], Part],
) -> list[Part]:
    """The named sources, or the one that the arguments `alone` are, by name.

    `make` is given a source's name, what the recipe says of it, and its path for messages, such as `sources.web.`.
    Raises `ArgumentError`.
    """
    if sources is not None:
        require_named(sources, temperature, alone)
        return [make(name, spec, f"sources.{name}.") for name, spec in sources.items()]
    if temperature is not None:
        raise ArgumentError("temperature", "has no effect without sources", "remove it")
    return [make("", kind(**alone), "")]


def require_named(sources: Mapping[str, SourceSpec], temperature: float | None, others: Mapping[str, Any]) -> None:
    """Refuse sources that can't be mixed, and arguments beside them that belong into one of them.

    `others` are those arguments, by name. Raises `ArgumentError`.
    """
    given = next((name for name, value in others.items() if value is not None), None)
    if given is not None:
        raise ArgumentError(given, "has no effect beside sources", "write it into the source that it is for")
    if not sources:
        raise ArgumentError("sources", "names no source")
    for name in sources:
        if not _NAME.fullmatch(name):
            raise ArgumentError("sources", f"{name!r} is no name of a source", "use letters, digits, _ and -")
    weighted = [name for name, spec in sources.items() if spec.weight is not None]
    if weighted and temperature is not None:
        raise ArgumentError("temperature", f"the source {weighted[0]!r} has a weight", "drop either")
    if weighted and len(weighted) < len(sources):
        without = next(name for name in sources if name not in weighted)
        raise ArgumentError(f"sources.{without}", "has no weight, and others have", "give all sources one, or none")


def rows_of(spec: SourceSpec, *, within: str = "") -> Source:
    """The files or the Hub data set of a source; `within` is its path, `sources.web.`, for messages.

    Raises `ArgumentError` unless exactly one of both is given.
    """
    if spec.files is not None and spec.hub_id is None:
        require_none(spec, ("hub_config", "split"), "has no effect on files; it needs hub_id", within=within)
        return FileSource(expand_files(spec.files, argument=f"{within}files"))
    if spec.hub_id is None or spec.files is not None:
        raise ArgumentError(f"{within}files", "give either files or hub_id")
    return HubSource(spec.hub_id, spec.hub_config, spec.split or "train", argument=f"{within}hub_id")


def tokens_of(spec: TextSource, *, within: str = "") -> MegatronSource:
    """The token files of a source that names some. Raises `ArgumentError` for anything beside them."""
    assert spec.megatron is not None
    if spec.files is not None or spec.hub_id is not None:
        raise ArgumentError(f"{within}megatron", "give one of files, hub_id and megatron")
    others = ("hub_config", "split", "field", "template")
    require_none(spec, others, "has no effect on tokens of megatron", within=within)
    return MegatronSource(expand_megatron(spec.megatron, argument=f"{within}megatron"))


def require_none(spec: SourceSpec, names: Iterable[str], message: str, *, within: str) -> None:
    """Refuse those of a source's keys that are given. Raises `ArgumentError`."""
    values = spec.model_dump()
    for name in names:
        if values[name] is not None:
            raise ArgumentError(f"{within}{name}", message)
