"""Attention by `torch.nn.functional.scaled_dot_product_attention`, called directly."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hp_core import ArgumentError, ReplacementContext, module_replacement
from hp_plugins.replacements.attention import StandardAttention, standard_attention

# Masks of other implementations have other shapes or none.
MASKED_ALIKE = ("sdpa", "eager")
# Above it the CUDA kernels that take fewer key than query heads fall back to plain arithmetic.
_LARGEST_GROUPED_HEAD = 256

Tensor = torch.Tensor


class SdpaAttention(StandardAttention):
    """`softmax(q k^T * scaling + mask) v` with dropout, causal where there is no mask.

    Masks are the model's: padding, sliding windows and packed documents (position ids that start again) arrive in
    `attention_mask`, as they do in the sdpa path of transformers. Attention weights are never returned.

    On CPU, where the mask says just that packed documents don't see each other, each is attended to by itself: a kernel
    with a mask computes all pairs of positions in the row and throws most of them away.
    """

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(batch, heads, S, D) to (batch, S, heads, D); fewer key heads are shared by the groups of query heads."""
        length = query.shape[2]
        dropout = self.attention_dropout if self.training else 0.0
        documents = None if dropout else packed_documents(attention_mask, kwargs.get("position_ids"))
        if documents is not None and len(documents) == len(query) and key.shape[2] == length:
            return self._attend_apart(query, key, value, documents), None
        causal = kwargs.get("is_causal")
        causal = self.is_causal if causal is None else causal
        causal = bool(causal) and length > 1 and attention_mask is None
        if causal and key.shape[2] > length:
            # A cache with room for later positions that has no earlier ones.
            key, value = key[:, :, :length], value[:, :, :length]
        grouped = self.num_key_value_groups > 1
        if grouped and not _kernels_take_groups(query, attention_mask):
            key, value = (one.repeat_interleave(self.num_key_value_groups, dim=1) for one in (key, value))
            grouped = False
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=dropout,
            is_causal=causal,
            scale=self.scaling,
            enable_gqa=grouped,
        )
        return output.transpose(1, 2), None

    def _attend_apart(self, query: Tensor, key: Tensor, value: Tensor, documents: list[list[int]]) -> Tensor:
        rows = []
        for row, lengths in enumerate(documents):
            split = (one[row : row + 1].split(lengths, dim=2) for one in (query, key, value))
            outputs = [
                F.scaled_dot_product_attention(
                    *parts, is_causal=True, scale=self.scaling, enable_gqa=self.num_key_value_groups > 1
                )
                for parts in zip(*split, strict=True)
            ]
            rows.append(torch.cat(outputs, dim=2))
        return torch.cat(rows).transpose(1, 2)


def packed_documents(attention_mask: Tensor | None, position_ids: Tensor | None) -> list[list[int]] | None:
    """The lengths of the documents in each row, (batch, S) positions that start again with each of them.

    None unless the (batch or 1, 1, S, S) mask, on the CPU, shows each position just the earlier ones of its document
    and itself, and some row holds several.
    """
    if attention_mask is None or position_ids is None or torch.compiler.is_compiling():
        return None
    length = position_ids.shape[-1]
    if attention_mask.device.type != "cpu" or attention_mask.dtype != torch.bool:
        return None
    shapes = [(rows, 1, length, length) for rows in (1, len(position_ids))]
    if position_ids.dim() != 2 or tuple(attention_mask.shape) not in shapes:
        return None
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if int(begins.sum()) == len(begins):
        return None
    numbers = begins.cumsum(1, dtype=torch.int32)
    shown = (numbers[:, :, None] == numbers[:, None, :]).tril_()
    if not torch.equal(shown[:, None], attention_mask.expand(len(shown), 1, length, length)):
        return None
    return [torch.bincount(row - 1).tolist() for row in numbers]


@module_replacement
def sdpa_attention(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    """Call `F.scaled_dot_product_attention` without a registry in between, and share key heads instead of copying them.

    On CPU key heads are shared under a mask too, where transformers copies them once for each query head. Works with
    a cache, for attention with q_proj, k_proj, v_proj, o_proj and rotary embeddings; the original class's forward is
    tried against it on a small input.

    Raises:
        ArgumentError: the module is another kind of attention (latent, with sinks or soft caps, vision), or the model's
            attn_implementation is none whose masks this code understands.
    """
    del module_fqn, context
    attention = standard_attention(module, SdpaAttention, tried=SdpaAttention)
    implementation = attention.config._attn_implementation
    if implementation not in MASKED_ALIKE:
        message = f"the model makes its masks for attn_implementation {implementation!r}"
        raise ArgumentError("", message, "write attn_implementation: sdpa")
    return attention


def _kernels_take_groups(query: Tensor, attention_mask: Tensor | None) -> bool:
    if query.device.type == "cpu":
        return True
    return attention_mask is None and query.shape[-1] <= _LARGEST_GROUPED_HEAD
