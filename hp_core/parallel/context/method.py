"""How ranks that share sequences attend to each other's parts, and what of a model's configuration rules it out.

No torch: `hp-train check` asks before any is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hp_core.config.models import AcceleratorConfig
from hp_core.errors import Problem
from hp_core.parallel.plan.shapes import SharedSizes

PATH = "accelerator.cp_size"
# Layers whose tokens meet in attention alone.
_ATTENDING = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})


def config_problems(values: Mapping[str, Any]) -> Iterator[Problem]:
    """What of a model's configuration depends on more of a sequence than attention sees.

    Positional embeddings that depend on the longest position of the input are among it: a trial on short rows would
    not show it.
    """
    hint = "remove 'cp_size'"
    for kind in sorted({str(kind) for kind in _found(values, "rope_type") if kind in ("dynamic", "longrope")}):
        message = (
            f"rotary embeddings of rope_type {kind!r} depend on the length of the input, of which a rank has a part"
        )
        yield Problem(message, path=PATH, hint=hint)
    layers = {str(kind) for kinds in _found(values, "layer_types") for kind in kinds or ()}
    for kind in sorted(layers - _ATTENDING):
        message = f"layers of type {kind!r} would see this rank's part of a sequence alone"
        yield Problem(message, path=PATH, hint=hint)


def _found(values: Mapping[str, Any], name: str) -> Iterator[Any]:
    """The values of that name, at any depth."""
    for key, value in values.items():
        if key == name:
            yield value
        elif isinstance(value, Mapping):
            yield from _found(value, name)


def head_problems(sizes: SharedSizes, accelerator: AcceleratorConfig) -> Iterator[Problem]:
    """What of a model's heads can't be exchanged among the ranks, with what could be."""
    tp_size = accelerator.tp_size
    if accelerator.cp_method != "ulysses":
        return
    for heads in sorted({heads for heads, _ in sizes.heads}):
        if heads % tp_size == 0:
            yield from exchange_problems(heads // tp_size, accelerator)


def exchange_problems(own: int, accelerator: AcceleratorConfig) -> Iterator[Problem]:
    """Why so many heads on each tensor rank can't be exchanged among the ranks, with the sizes that would do."""
    cp_size, tp_size = accelerator.cp_size, accelerator.tp_size
    if own % cp_size == 0:
        return
    each = f" on each of {tp_size} tensor ranks" if tp_size > 1 else ""
    message = f"{own} attention heads{each} can't be exchanged among {cp_size} ranks"
    works = ", ".join(str(size) for size in range(1, own + 1) if own % size == 0)
    hint = f"cp_size that would: {works}; or write accelerator.cp_method: ring or all_gather"
    yield Problem(message, path=PATH, hint=hint)
