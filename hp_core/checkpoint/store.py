"""Loading a checkpoint of any layout, made with torch's distributed checkpoint (DCP)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from hp_core.checkpoint.layout import Checkpoint
from hp_core.checkpoint.places import Place, nearest, same_stream
from hp_core.checkpoint.rank_state import RankState, restore_loss, unpacked
from hp_core.checkpoint.reading import Reader, read_metadata
from hp_core.checkpoint.tensors import (
    empty_optimizer_tensors,
    model_tensors,
    require_same_model,
    require_whole_state,
    restore_optimizers,
)
from hp_core.checkpoint.writing import cause_of
from hp_core.errors import HpError, InputError
from hp_core.parallel.agreement import gathered
from hp_core.parallel.pipeline.stages import elsewhere
from hp_core.parallel.setup import DistributedSetup
from hp_core.training.state import restore_random_state, seed_everything


@dataclass(frozen=True)
class Restored:
    """What became of what ranks keep for themselves.

    `new_ranks` are those whose random numbers start anew, by the seed, their place and the step: no rank of the run
    before did what they do. `plugin_state` is what this rank's plugins remembered.
    """

    new_ranks: tuple[int, ...]
    plugin_state: dict[str, dict[str, Any]]


def load_checkpoint(
    checkpoint: Checkpoint,
    *,
    model: nn.Module,
    loss_fn: nn.Module,
    optimizers: list[Optimizer],
    seed: int,
    setup: DistributedSetup,
) -> Restored:
    """Fill `model`, `loss_fn` and `optimizers` from a checkpoint of any layout. Every rank calls it.

    Raises:
        InputError: the checkpoint does not fit the model, the loss or the optimizer, or can't be read.
    """
    state = checkpoint.trainer_state()
    written_by = state["optimizers"]
    if written_by != optimizer_names(optimizers):
        raise InputError(
            f"{checkpoint.path}: written with {', '.join(written_by)}, the recipe builds "
            f"{', '.join(optimizer_names(optimizers))}; the optimizer's state can't be carried over"
        )
    places, saved = gathered(Place.of(setup), setup), [Place(**one) for one in state.get("places", ())]
    with _reading(checkpoint.path):
        metadata = read_metadata(checkpoint.path)
        own = _own_state(checkpoint.path, places[setup.rank], saved)
    restore_loss(loss_fn, model, own.loss, checkpoint.path)
    tensors = model_tensors(model)
    require_same_model(tensors, metadata, checkpoint.path, tuple(elsewhere(model)))
    if "optimizer_state" in state:
        stored = metadata.state_dict_metadata
        require_whole_state(state["optimizer_state"], stored, state["optimizer_scalars"], checkpoint.path)
    room = empty_optimizer_tensors(model, metadata)
    with _reading(checkpoint.path):
        dcp.load({**tensors, **room}, storage_reader=Reader(checkpoint.path), process_group=setup.host_group)
    restore_optimizers(model, optimizers, room, state["optimizer_scalars"])
    new_ranks = tuple(rank for rank, place in enumerate(places) if same_stream(place, saved) is None)
    with _reading(checkpoint.path):
        if setup.rank in new_ranks:
            seed_everything(seed, setup.random_rank, checkpoint.step)
        else:
            restore_random_state(own.random)
    return Restored(new_ranks, own.plugins)


def _own_state(path: Path, place: Place, saved: list[Place]) -> RankState:
    """What a rank in this place goes on with."""
    rank = nearest(place, saved) if saved else 0
    stream = same_stream(place, saved)
    memory = unpacked(path, rank)
    random = memory.random if stream in (None, rank) else unpacked(path, stream).random
    return RankState(random, memory.loss, memory.plugins)


def optimizer_names(optimizers: list[Optimizer]) -> list[str]:
    """The optimizers' class names, as the checkpoint records them."""
    return [type(optimizer).__name__ for optimizer in optimizers]


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except HpError:
        raise
    # Broken pickles raise whatever their bytes happen to spell; DCP's own exception is no Exception.
    except (CheckpointException, Exception) as error:
        raise InputError(f"{path}: can't be loaded into this model: {cause_of(error)}") from error
