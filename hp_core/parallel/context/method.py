"""How ranks that share sequences attend to each other's parts, and the head counts that this needs.

No torch: `hp-train check` asks before any is imported.
"""

from __future__ import annotations

from collections.abc import Iterator

from hp_core.config.models import AcceleratorConfig
from hp_core.errors import Problem
from hp_core.parallel.plan.shapes import SharedSizes


def head_problems(sizes: SharedSizes, accelerator: AcceleratorConfig) -> Iterator[Problem]:
    """What of a model's heads can't be exchanged among the ranks, with what could be."""
    cp_size, tp_size = accelerator.cp_size, accelerator.tp_size
    if accelerator.cp_method != "ulysses":
        return
    for heads in sorted({heads for heads, _ in sizes.heads}):
        own = heads // tp_size
        if heads % tp_size or own % cp_size == 0:
            continue
        each = f" on each of {tp_size} tensor ranks" if tp_size > 1 else ""
        message = f"{own} attention heads{each} can't be exchanged among {cp_size} ranks"
        works = ", ".join(str(size) for size in range(1, own + 1) if own % size == 0)
        hint = f"cp_size that would: {works}; or write accelerator.cp_method: ring or all_gather"
        yield Problem(message, path="accelerator.cp_size", hint=hint)
