"""A rank's part of each sequence: which positions it holds, and the rows of a batch cut to them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hp_core.data.protocols import IGNORED_LABEL
from hp_core.parallel.context.tiles import Tile, tiles_of
from hp_core.parallel.setup import DistributedSetup

# What the model's attention is told under.
SLICE = "sequence_slice"
# Scores of so many tokens for as many others are held at a time by attention that computes them in tiles.
TILE_SIZE = 1024


@dataclass(frozen=True, eq=False)
class SequenceSlice:
    """The part of its rows' sequences that a rank holds, for attention.

    Args:
        positions: (own tokens,) where the rank's tokens are in the whole sequence.
        all_positions: (all tokens,) the same for the tokens of all ranks, in the order in which they are gathered.
        documents: (rows, own tokens) which document each of the rank's tokens belongs to.
        all_documents: (rows, all tokens) the same for all ranks.
        group: the ranks that share the sequences.
        tiles: for each rank, its tokens in runs of neighbours.
    """

    positions: torch.Tensor
    all_positions: torch.Tensor
    documents: torch.Tensor
    all_documents: torch.Tensor
    group: dist.ProcessGroup
    tiles: tuple[tuple[Tile, ...], ...]

    def to(self, device: torch.device, *, non_blocking: bool = False) -> SequenceSlice:
        """The same on another device."""
        own = (self.positions, self.documents)
        positions, documents = (one.to(device, non_blocking=non_blocking) for one in own)
        everywhere = (self.all_positions, self.all_documents)
        all_positions, all_documents = (one.to(device, non_blocking=non_blocking) for one in everywhere)
        return SequenceSlice(positions, all_positions, documents, all_documents, self.group, self.tiles)

    def mask(self, window: int | None = None) -> torch.Tensor:
        """Which tokens of all ranks each of the rank's tokens sees: bool, (rows, 1, own tokens, all tokens)."""
        return sight(self.positions, self.documents, self.all_positions, self.all_documents, window)

    def whole_mask(self, window: int | None = None) -> torch.Tensor:
        """Which tokens of all ranks each of them sees: bool, (rows, 1, all tokens, all tokens)."""
        return sight(self.all_positions, self.all_documents, self.all_positions, self.all_documents, window)


def sight(
    positions: torch.Tensor,
    documents: torch.Tensor,
    other_positions: torch.Tensor,
    other_documents: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """Which other tokens each token sees: bool, (rows, 1, tokens, others).

    A token sees itself and what is before it in its document, with a `window` the last so many of these.

    Args:
        positions: (tokens,) where they are in the sequence.
        documents: (rows, tokens) which document each belongs to.
        other_positions: (others,)
        other_documents: (rows, others)
        window: None if there is none.
    """
    distance = positions[:, None] - other_positions[None, :]
    sees = distance >= 0
    if window is not None:
        sees = sees & (distance < window)
    return (sees & (documents[:, :, None] == other_documents[:, None, :]))[:, None]


def slices_of(length: int, num_ranks: int, *, balanced: bool) -> list[torch.Tensor]:
    """The positions that each rank holds of a sequence.

    Contiguous parts leave the last rank most of the causal attention's work. Balanced, a rank holds one chunk from the
    front and the one that is as far from the end.

    Args:
        length: a multiple of `num_ranks`, and of twice as much where the parts are balanced.
        num_ranks: the ranks that share it.
        balanced: whether every rank is to have the same work.
    """
    if not balanced:
        return list(torch.arange(length).chunk(num_ranks))
    chunks = torch.arange(length).chunk(2 * num_ranks)
    return [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(num_ranks)]


def own_part(
    model_inputs: Mapping[str, Any],
    loss_inputs: Mapping[str, Any],
    setup: DistributedSetup,
    *,
    whole: Container[str] = (),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A batch with this rank's part of every sequence; see `cut`."""
    group, rank = setup.cp_mesh.get_group(), setup.axis_rank("cp")
    balanced = setup.accelerator.cp_layout == "head_tail"
    return cut(model_inputs, loss_inputs, rank=rank, group=group, balanced=balanced, whole=whole)


def cut(
    model_inputs: Mapping[str, Any],
    loss_inputs: Mapping[str, Any],
    *,
    rank: int,
    group: dist.ProcessGroup,
    balanced: bool,
    whole: Container[str] = (),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A batch with the rank's part of every sequence; what has not the shape of the labels stays as it is.

    The sequences are padded where their length doesn't divide. Labels are shifted already, so no target is lost where
    a sequence is cut.

    Args:
        model_inputs: with `position_ids` (rows, tokens) that restart with each document.
        loss_inputs: with `labels` (rows, tokens).
        rank: this rank's place in the group.
        group: the ranks that share the sequences.
        balanced: see `slices_of`.
        whole: what of the model's inputs is padded alone, for a model that cuts its sequences itself.
    """
    shape = loss_inputs["labels"].shape
    num_ranks = group.size()
    unit = num_ranks * (2 if balanced else 1)
    padding = -shape[1] % unit
    longer = padded(model_inputs, loss_inputs, padding)
    parts = slices_of(shape[1] + padding, num_ranks, balanced=balanced)
    documents = torch.cumsum(longer[0]["position_ids"] == 0, dim=1)
    everywhere = torch.cat(parts)
    own = parts[rank]
    tiles = tuple(tiles_of(part, documents[:, part], TILE_SIZE) for part in parts)
    sequence_slice = SequenceSlice(own, everywhere, documents[:, own], documents[:, everywhere], group, tiles)
    padded_shape = (shape[0], shape[1] + padding)
    cut_model, cut_loss = (
        {name: value[:, own] if _is_by_token(value, padded_shape) else value for name, value in inputs.items()}
        for inputs in longer
    )
    uncut = {name: value for name, value in longer[0].items() if name in whole}
    return {**cut_model, **uncut, SLICE: sequence_slice}, cut_loss


def padded(
    model_inputs: Mapping[str, Any], loss_inputs: Mapping[str, Any], padding: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A batch with so many more tokens in each row: a document of their own, without targets."""
    shape = loss_inputs["labels"].shape
    if padding and "is_padding" not in loss_inputs:
        loss_inputs = {**loss_inputs, "is_padding": _rows_that_fill_up(loss_inputs, shape)}
    longer_model, longer_loss = (
        {name: _padded(name, value, shape, padding) for name, value in inputs.items()}
        for inputs in (model_inputs, loss_inputs)
    )
    return longer_model, longer_loss


def _is_by_token(value: Any, shape: tuple[int, ...] | torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.shape[:2] == shape


def _rows_that_fill_up(loss_inputs: Mapping[str, Any], shape: torch.Size) -> torch.Tensor:
    is_padding = torch.zeros(shape, dtype=torch.bool)
    sample_ids = loss_inputs.get("sample_ids")
    if sample_ids is not None:
        is_padding[sample_ids < 0] = True
    return is_padding


def _padded(name: str, value: Any, shape: torch.Size, padding: int) -> Any:
    if not padding or not _is_by_token(value, shape):
        return value
    size = (shape[0], padding, *value.shape[2:])
    if name == "position_ids":
        # A document of its own, which the others don't see.
        filling = torch.arange(padding, dtype=value.dtype).expand(size)
    elif name in ("labels", "shift_labels") or name.endswith("_labels"):
        filling = torch.full(size, IGNORED_LABEL, dtype=value.dtype)
    else:
        filling = torch.full(size, name == "is_padding", dtype=value.dtype)
    return torch.cat([value, filling], dim=1)
