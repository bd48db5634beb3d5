"""Saving and loading one checkpoint through torch's distributed checkpoint (DCP), atomically."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from hp_core.checkpoint.layout import MANIFEST, TRAINER_STATE, Checkpoint, step_directory
from hp_core.checkpoint.tensors import (
    empty_optimizer_tensors,
    model_tensors,
    optimizer_scalars,
    optimizer_tensors,
    require_same_model,
    restore_optimizers,
)
from hp_core.errors import InputError, Problem, RunError
from hp_core.parallel.agreement import gathered
from hp_core.parallel.pipeline.stages import elsewhere
from hp_core.parallel.setup import DistributedSetup
from hp_core.training.state import random_state, restore_random_state, seed_everything


def save_checkpoint(
    run_directory: Path,
    step: int,
    *,
    model: nn.Module,
    loss_fn: nn.Module,
    optimizers: list[Optimizer],
    trainer_state: dict[str, Any],
    manifest: dict[str, Any],
    setup: DistributedSetup,
) -> Path:
    """Write the checkpoint after `step` steps and return its directory. Every rank calls it.

    Everything is written beside the final name and renamed when all ranks are done, so a directory with the final
    name is complete.

    Raises:
        RunError: it could not be written; what was there before is untouched.
    """
    final = step_directory(run_directory, step)
    temporary = final.with_name(final.name + ".tmp")
    # Each rank of a pipeline has some parameters.
    by_rank = gathered(optimizer_scalars(model, optimizers), setup)
    scalars = {name: one for part in by_rank for name, one in part.items()}
    state = {**trainer_state, "optimizer_scalars": scalars}
    with _writing(final):
        if setup.environment.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        setup.barrier()
        torch.save(random_state(), temporary / _random_file(setup.rank))
        # What a loss remembers it has seen on its own rank.
        torch.save(_loss_state(loss_fn, model), temporary / _loss_file(setup.rank))
        dcp.save({**model_tensors(model), **optimizer_tensors(model, optimizers)}, checkpoint_id=temporary)
        setup.barrier()
        if setup.environment.is_main:
            _write_json(temporary / TRAINER_STATE, state)
            _write_json(temporary / MANIFEST, manifest)
            _rename(temporary, final)
        setup.barrier()
    return final


def load_checkpoint(
    checkpoint: Checkpoint,
    *,
    model: nn.Module,
    loss_fn: nn.Module,
    optimizers: list[Optimizer],
    seed: int,
    setup: DistributedSetup,
) -> bool:
    """Fill `model`, `loss_fn` and `optimizers` from a checkpoint of any layout. Every rank calls it.

    Returns:
        True when the random streams of this rank and what its loss remembered were restored; False when another
        number of ranks wrote the checkpoint: new streams were made from the seed and the step, and the loss has the
        state of the first rank.

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
    with _reading(checkpoint.path):
        metadata = dcp.FileSystemReader(checkpoint.path).read_metadata()
        same_world = state["world_size"] == setup.world_size
        random = torch.load(checkpoint.path / _random_file(setup.rank), weights_only=True) if same_world else None
        loss_rank = setup.rank if same_world else 0
        loss_file = checkpoint.path / _loss_file(loss_rank)
        loss_state = torch.load(loss_file, weights_only=True, map_location="cpu")
    _load_loss(loss_fn, model, loss_state, checkpoint.path)
    tensors = model_tensors(model)
    require_same_model(tensors, metadata, checkpoint.path, tuple(elsewhere(model)))
    room = empty_optimizer_tensors(model, metadata)
    with _reading(checkpoint.path):
        dcp.load({**tensors, **room}, checkpoint_id=checkpoint.path)
    restore_optimizers(model, optimizers, room, state["optimizer_scalars"])
    if random is None:
        seed_everything(seed, setup.random_rank, checkpoint.step)
        return False
    restore_random_state(random)
    return True


def _loss_state(loss_fn: nn.Module, model: nn.Module) -> dict[str, Any]:
    """What a loss remembers, without the tensors of the model, which it may hold as well."""
    of_model = {id(one) for one in (*model.parameters(), *model.buffers())}
    state = loss_fn.state_dict(keep_vars=True)
    own = {name: one for name, one in state.items() if id(one) not in of_model}
    return {name: one.detach() if isinstance(one, torch.Tensor) else one for name, one in own.items()}


def _load_loss(loss_fn: nn.Module, model: nn.Module, state: dict[str, Any], path: Path) -> None:
    expected = set(_loss_state(loss_fn, model))
    if expected != set(state):
        missing, strange = sorted(expected - set(state)), sorted(set(state) - expected)
        found = f"lacks {missing[0]!r}" if missing else f"holds {strange[0]!r}, which the loss has no place for"
        hint = "a loss registers all its buffers when it is built"
        message = f"{path}: what {type(loss_fn).__name__} remembered {found}"
        raise InputError(Problem(message, path="loss_fn", hint=hint))
    try:
        loss_fn.load_state_dict(state, strict=False)
    except RuntimeError as error:
        message = f"{path}: what {type(loss_fn).__name__} remembered does not fit: {_first_line(error)}"
        raise InputError(Problem(message, path="loss_fn")) from error


def optimizer_names(optimizers: list[Optimizer]) -> list[str]:
    """The optimizers' class names, as the checkpoint records them."""
    return [type(optimizer).__name__ for optimizer in optimizers]


@contextmanager
def _writing(final: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointException, OSError, RuntimeError) as error:
        raise RunError(f"can't write checkpoint {final}: {_first_line(error)}") from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    # Broken pickles raise whatever their bytes happen to spell; DCP's own exception is no Exception.
    except (CheckpointException, Exception) as error:
        raise InputError(f"{path}: can't be loaded into this model: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    # DCP's text is the failures of every rank with their tracebacks.
    causes = list(error.failures.values()) if isinstance(error, CheckpointException) else []
    cause = causes[0][0] if causes else error
    return f"{type(cause).__name__}: {cause}".splitlines()[0]


def _random_file(rank: int) -> str:
    return f"random_rank_{rank:05d}.pt"


def _loss_file(rank: int) -> str:
    return f"loss_rank_{rank:05d}.pt"


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _rename(temporary: Path, final: Path) -> None:
    # The step exists when a run went on from an older checkpoint; it goes only once the new one is in its place.
    old = final.with_name(final.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    temporary.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    directory = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
