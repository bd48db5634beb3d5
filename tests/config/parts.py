"""Components for the recipe tests; none of them imports torch."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
from typing_extensions import TypedDict

from hp_core.errors import ArgumentError

if TYPE_CHECKING:
    from somewhere import Thing


@dataclasses.dataclass
class Warmup:
    steps: int
    start: float = 0.0


class Decay(pydantic.BaseModel):
    rate: Annotated[float, pydantic.Field(ge=0, le=1)] = 0.1
    modules: list[str] = []


class Window(TypedDict, total=False):
    size: int


class Recorder:
    """Keeps what it was built with."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments


class Adam(Recorder):
    """A made-up optimizer with an argument of every kind."""

    def __init__(
        self,
        model: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        mode: Literal["plain", "fused"] = "plain",
        warmup: Warmup | None = None,
        decay: Decay | None = None,
        window: Window | None = None,
        groups: Sequence[str] = (),
        steps: int | str = 1,
        path: pathlib.Path | None = None,
        table: dict[str, float] | None = None,
        free: Any = None,
        untyped=None,
        thing: Thing = None,
        foreach: bool = False,
    ) -> None:
        given = dict(locals())
        for name in ("self", "__class__"):
            given.pop(name, None)
        super().__init__(**given)
        if lr == 0.5:
            raise ArgumentError("decay.modules[0]", "matches nothing", "did you mean 'b'?")
        if lr == 0.25:
            raise TypeError("a fault of the component's own")

    @classmethod
    def small(cls, model: Any, lr: float) -> Adam:
        return cls(model, lr)


class Sgd(Recorder):
    def __init__(self, model: Any, lr: float = 0.1, momentum: float = 0.0) -> None:
        super().__init__(model=model, lr=lr, momentum=momentum)


def net(size: int, activation_checkpoint: Any = None, note: str = "") -> dict[str, Any]:
    return {"size": size, "activation_checkpoint": activation_checkpoint, "note": note}


def anything(**options: Any) -> dict[str, Any]:
    return options


def text(config: Any) -> str:
    return "trainer"


def rows(path: str | None = None, limit: int | None = None, tokenizer: Any = None) -> list[Any]:
    return [path, limit, tokenizer]


def other_rows(folder: str = "") -> list[str]:
    return [folder]


def words(vocabulary: int = 10) -> int:
    return vocabulary


def loader(dataset: Any, collate_fn: Any, batch_size: int, num_workers: int = 0) -> tuple[Any, ...]:
    return dataset, collate_fn, batch_size, num_workers


def pad(tokenizer: Any, side: Literal["left", "right"] = "right") -> str:
    return side


def positional(value: int, /) -> int:
    return value


def tracker(run_dir: Any, project: str = "p") -> tuple[Any, str]:
    return run_dir, project


run_command = os.system
run_partial = functools.partial(os.popen, "true")
CONSTANT = 3


class Mapping2(dict):  # type: ignore[type-arg]
    pass
