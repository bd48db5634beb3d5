"""The head counts and widths that tensor ranks share out, and the numbers of ranks that they allow.

No torch: `hp-train check` asks before any is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hp_core.errors import Problem
from hp_core.parallel.expert.count import NUM_EXPERTS_KEYS

PATH = "accelerator.tp_size"


@dataclass(frozen=True)
class SharedSizes:
    """What a model has to be cut evenly: (query heads, key and value heads) of its attentions, widths of its MLPs."""

    heads: frozenset[tuple[int, int]] = frozenset()
    widths: frozenset[int] = frozenset()

    def misfits(self, tp_size: int) -> Iterator[str]:
        """What `tp_size` ranks can't share, one message each.

        Key and value heads may be fewer than the ranks: each rank then computes one of them, as others do.
        """
        for heads, kv_heads in sorted(self.heads):
            if heads % tp_size:
                yield f"{heads} attention heads can't be shared by {tp_size} ranks"
            if kv_heads % tp_size and tp_size % kv_heads:
                yield f"{kv_heads} key and value heads can't be shared by {tp_size} ranks"
        for width in sorted(self.widths):
            if width % tp_size:
                yield f"an MLP of width {width} can't be shared by {tp_size} ranks"

    def fitting(self, limit: int = 64) -> list[int]:
        """Every number of ranks up to `limit` that can share all of it."""
        limit = min([limit, *(heads for heads, _ in self.heads), *self.widths])
        return [size for size in range(1, limit + 1) if not any(self.misfits(size))]

    def problems(self, tp_size: int) -> list[Problem]:
        """What `tp_size` ranks can't share, with the numbers of ranks that could share all of it."""
        *rest, last = map(str, self.fitting())
        hint = f"use {', '.join(rest)} or {last}" if rest else f"use {last}"
        return [Problem(message, path=PATH, hint=hint) for message in self.misfits(tp_size)]


def sizes_in_config(config: Mapping[str, Any]) -> SharedSizes:
    """What the values of a model's configuration say, as far as they do: those of the text model of a composite."""
    text = config.get("text_config")
    values = text if isinstance(text, Mapping) else config
    heads = _size(values, "num_attention_heads")
    width = _size(values, "intermediate_size")
    # Latent attention expands its keys and values to all heads.
    is_latent = values.get("kv_lora_rank") is not None
    kv_heads = (None if is_latent else _size(values, "num_key_value_heads")) or heads
    # A mixture's config keeps the width of dense layers whether or not it has any.
    has_experts = any(values.get(key) for key in NUM_EXPERTS_KEYS)
    return SharedSizes(
        frozenset({(heads, kv_heads)}) if heads and kv_heads else frozenset(),
        frozenset({width}) if width and not has_experts else frozenset(),
    )


def _size(values: Mapping[str, Any], key: str) -> int | None:
    value = values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
