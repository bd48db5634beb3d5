"""The section of an entry of `plan_overrides`: one change to every module that its patterns match."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from hp_core.config.base import Conflict, Section
from hp_core.config.target import Target


def _as_patterns(value: Any) -> Any:
    if not isinstance(value, (str, list, tuple)):
        raise PydanticCustomError("text_or_list_type", "expected text or a list of text")
    return (value,) if isinstance(value, str) else tuple(value)


Pattern: TypeAlias = Annotated[str, Field(min_length=1)]
Patterns: TypeAlias = Annotated[
    tuple[Pattern, ...],
    Field(min_length=1),
    BeforeValidator(_as_patterns, json_schema_input_type=Pattern | Annotated[list[Pattern], Field(min_length=1)]),
]


_PLACEMENT = re.compile(r"replicate|partial|shard\(-?\d{1,2}\)")
NONE = "none"


def _as_placement(value: Any) -> Any:
    if isinstance(value, str) and _PLACEMENT.fullmatch(value) is None:
        raise PydanticCustomError(
            "placement", "expected replicate, partial or shard(N), got {value}", {"value": repr(value)}
        )
    return value


PlacementText: TypeAlias = Annotated[str, BeforeValidator(_as_placement)]


class AxisPlacements(Section):
    """How a tensor lies on the ranks of each axis that shares the work on one data slice."""

    tp: PlacementText | None = Field(None, description="On the ranks of `tp_size`.")
    cp: PlacementText | None = Field(None, description="On the ranks of `cp_size`.")
    ep: PlacementText | None = Field(None, description="On the ranks of `ep_size`.")

    @property
    def is_written(self) -> bool:
        """Whether it says anything."""
        return any(one is not None for one in (self.tp, self.cp, self.ep))

    def on(self, axis: str) -> str | None:
        """What it says of `tp`, `cp` or `ep`."""
        return {"tp": self.tp, "cp": self.cp, "ep": self.ep}[axis]


def _none_clears(value: Any) -> Any:
    return {} if value == NONE else value


Placements: TypeAlias = Annotated[
    AxisPlacements, BeforeValidator(_none_clears, json_schema_input_type=AxisPlacements | Literal["none"])
]
NamedPlacements: TypeAlias = Annotated[
    dict[str, AxisPlacements],
    BeforeValidator(_none_clears, json_schema_input_type=dict[str, AxisPlacements] | Literal["none"]),
]


class PlanOverride(Section):
    """An entry is one change to every module of the model that its patterns match.

    `params`, `in_src`, `in_dst`, `out_src` and `out_dst` are its sharding contract: what is written takes the place of
    what the planner derived, `none` clears it, and what is left out stays. A placement is `replicate` (whole on every
    rank of the axis), `shard(N)` (cut along dimension N) or `partial` (summands); axes are `tp`, `cp` and `ep`, and
    those of size 1 change nothing.
    """

    match: Patterns = Field(
        description="A glob, or a list of globs, over the names of the model's modules. `*` crosses dots; each glob "
        "must match a module."
    )
    when: Literal["dp", "tp", "cp", "ep", "pp"] | None = Field(
        None, description="Apply the entry only where this parallel size is above 1; null applies it always."
    )
    module_type: str | None = Field(
        None, description="Dotted path of the `torch.nn.Module` class that every match must be an instance of."
    )
    exact_type: bool = Field(False, description="Every match must be of `module_type` itself, not of a subclass.")
    replace_module: Target | None = Field(None, description="The component that makes the replacement of each match.")
    params: NamedPlacements | None = Field(
        None, description="`{name within the module: {axis: placement}}` of parameters; those not named are whole."
    )
    in_src: NamedPlacements | None = Field(
        None, description="`{argument of forward: {axis: placement}}` of inputs, as what comes before gives them."
    )
    in_dst: NamedPlacements | None = Field(
        None, description="`{argument of forward: {axis: placement}}` of inputs, as the module computes with them."
    )
    out_src: Placements | None = Field(
        None, description="`{axis: placement}` of the output (the first, of several), as the module computes it."
    )
    out_dst: Placements | None = Field(
        None, description="`{axis: placement}` of the output, as what comes after takes it in."
    )
    inner_wrapper: Target | None = Field(
        None, description="The component that weaves code into the forward of each match, which is an attention."
    )
    local_compute_fn: Target | None = Field(
        None, description="The component that makes what each match, which holds experts, computes with its own part."
    )

    CONTRACT: ClassVar[tuple[str, ...]] = ("params", "in_src", "in_dst", "out_src", "out_dst")
    ACTIONS: ClassVar[tuple[str, ...]] = ("replace_module", *CONTRACT, "inner_wrapper", "local_compute_fn")

    @property
    def has_contract(self) -> bool:
        """Whether the entry says anything of placements."""
        return any(one is not None for one in (self.params, self.in_src, self.in_dst, self.out_src, self.out_dst))

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        """Yield one for an entry without an action, and one for an exact type that isn't named."""
        if all(values.get(action) is None for action in cls.ACTIONS):
            yield Conflict("does nothing", hint=f"write {', '.join(cls.ACTIONS[:-1])} or {cls.ACTIONS[-1]}")
        if values.get("exact_type") is True and values.get("module_type") is None:
            yield Conflict("needs module_type, the type that is meant", "exact_type", "write it, or remove exact_type")
