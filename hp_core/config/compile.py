"""The recipe's section on compiling modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from hp_core.config.base import Conflict, Section, value_at

RECORDING = ("reduce-overhead", "max-autotune")
"""The modes that record CUDA graphs."""


class CompileConfig(Section):
    """Whether layers run as code that torch.compile made of them, and what happens where it can't."""

    mode: Literal["off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = Field(
        "off",
        description="`off` runs layers as they are written; `default` compiles each; the others do what torch.compile "
        "does by these names: record CUDA graphs (`reduce-overhead`), try several kernels for each product "
        "(`max-autotune-no-cudagraphs`), or both.",
    )
    backend: str = Field("inductor", min_length=1, description="What makes code of a graph, by torch.compile's name.")
    modules: list[str] | None = Field(
        None,
        min_length=1,
        description="Patterns of the modules to compile, by FQN (`*` crosses dots); null takes each layer.",
    )
    dynamic: bool | None = Field(
        None,
        description="Compile for all lengths at once (true) or for each length anew (false); null compiles for the "
        "first length, and for all when a second one comes.",
    )
    on_failure: Literal["stop", "eager"] = Field(
        "stop",
        description="What to do when something can't be compiled: end the run, or run that part as it is written and "
        "say so.",
    )

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        """Yield one for each key without effect."""
        mode, backend = values.get("mode", "off"), values.get("backend", "inductor")
        if mode == "off":
            for key in ("backend", "modules", "dynamic", "on_failure"):
                if values.get(key) not in (None, cls.model_fields[key].default):
                    yield Conflict("has no effect with mode off", key, f"write mode: default, or remove '{key}'")
        elif mode != "default" and backend != "inductor":
            yield Conflict(f"only inductor has it, and the backend is {backend!r}", "mode", "write mode: default")


def compile_conflicts(recipe: Mapping[str, Any]) -> Iterator[Conflict]:
    """Yield one for each setting of another section that compiled modules can't be combined with.

    `recipe` has the sections `compile`, `accelerator`, `activation_checkpoint`, `activation_swap` and `training`, or
    some of them.
    """
    mode = value_at(recipe, "compile", "mode") or "off"
    if mode == "off":
        return
    if mode in RECORDING:
        if value_at(recipe, "training", "device") == "cpu":
            yield Conflict(f"{mode} records CUDA graphs, which a CPU hasn't", "compile.mode", without_graphs(mode))
        if (value_at(recipe, "activation_swap", "mode") or "off") != "off":
            message = "moves what is kept for the backward pass, which CUDA graphs look for where it was"
            hint = f"{without_graphs(mode)}, or write activation_swap.mode: off"
            yield Conflict(f"{message}; compile.mode {mode} records them", "activation_swap.mode", hint)
    spreads = (value_at(recipe, "accelerator", "ep_size") or 1) != 1
    if spreads and value_at(recipe, "activation_checkpoint", "mode") == "selective":
        why = "keeps results of single operators, and layers that send tokens to experts are compiled in pieces"
        yield Conflict(f"selective {why}", "activation_checkpoint.mode", "write mode: full, or compile.mode: off")


def without_graphs(mode: str) -> str:
    """What to write in the place of a mode that records CUDA graphs."""
    return "write mode: default" if mode == "reduce-overhead" else "write mode: max-autotune-no-cudagraphs"
