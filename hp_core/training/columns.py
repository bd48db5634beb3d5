"""Arrays of the rows that a loss takes beside the labels: looked for before the first step, handed over in each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hp_core.data.packing import WEIGHTS
from hp_core.data.protocols import EMPTY_ROW, Datasets, RowDataset, Sample
from hp_core.data.rows import WithEmptyRow
from hp_core.errors import InputError, Problem, RunError
from hp_core.parallel.setup import DistributedSetup
from hp_core.spelling import did_you_mean

# Every row has these; whatever else it holds is a column.
_EVERY_ROW = frozenset(Sample.__annotations__)
_NUMERIC = "biuf"


def require_columns(
    columns: Sequence[str], loss_fn: nn.Module, datasets: Datasets, setup: DistributedSetup, *, all_used: bool
) -> None:
    """Refuse data that lacks a column the loss takes, and, with `all_used`, a column of the recipe that it doesn't.

    Looks at the first row of each data set. Every rank calls it, and every rank gets the same answer.

    Raises:
        InputError: names the column, the loss and the columns that are there.
    """
    problems = [*_lacking(columns, loss_fn, datasets)]
    if all_used:
        problems += _unused(columns, loss_fn, datasets.train)
    everywhere: list[Any] = [problems]
    if setup.world_size > 1:
        everywhere = [None] * setup.world_size
        dist.all_gather_object(everywhere, problems, group=setup.host_group)
    for found in everywhere:
        if found:
            raise InputError(found)


def column_arguments(loss_inputs: Mapping[str, Any], columns: Sequence[str]) -> dict[str, torch.Tensor]:
    """The micro-batch's `columns`, as keyword arguments for the loss: tensors of the labels' shape.

    Raises:
        RunError: one was lost, or changed its shape, between the row and here.
    """
    arguments: dict[str, torch.Tensor] = {}
    for name in columns:
        value, shape = loss_inputs.get(name), tuple(loss_inputs["labels"].shape)
        if not isinstance(value, torch.Tensor):
            where = "the collator, the loader or get_batch left it out"
            raise RunError(f"the loss takes the column {name!r}, which the micro-batch lacks: {where}")
        if tuple(value.shape) != shape:
            raise RunError(
                f"the column {name!r} of a micro-batch has the shape {tuple(value.shape)}, its labels {shape}"
            )
        arguments[name] = value
    return arguments


def empty_columns(dataset: RowDataset, length: int) -> dict[str, torch.Tensor]:
    """Every numeric column of the empty row, as a batch of one row that is `length` long."""
    arrays = {name: np.asarray(value) for name, value in _columns_in(dataset[EMPTY_ROW]).items()}
    return {
        name: torch.from_numpy(np.resize(array, (1, length)) if array.shape == (dataset.max_seq_len,) else array[None])
        for name, array in arrays.items()
        if array.dtype.kind in _NUMERIC
    }


def _is_empty(dataset: RowDataset) -> bool:
    is_streamed = isinstance(dataset, WithEmptyRow) and dataset.streamed is not None
    return not is_streamed and len(dataset) == 0


def _columns_in(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in _EVERY_ROW}


def _lacking(columns: Sequence[str], loss_fn: nn.Module, datasets: Datasets) -> Iterator[Problem]:
    loss = type(loss_fn).__name__
    missing = set(columns)
    for role, dataset in (("training", datasets.train), ("validation", datasets.validation), ("test", datasets.test)):
        if dataset is None or not columns or _is_empty(dataset):
            continue
        held = _columns_in(dataset[0])
        for name in [name for name in columns if name in missing]:
            if name not in held:
                there = ", ".join(held) or "none"
                message = f"the {role} rows lack the column {name!r}, which {loss} takes; their columns: {there}"
            elif fault := _fault(held[name], dataset.max_seq_len):
                message = f"the column {name!r} of the {role} rows, which {loss} takes, {fault}"
            else:
                continue
            # Told once: the parts of one data set lack the same.
            missing.remove(name)
            guess = did_you_mean(name, held)
            hint = f"the `text` dataset brings numeric fields of its files with columns: [{', '.join(columns)}]"
            yield Problem(message, path="dataset", hint=f"{guess} {hint}".strip() if name not in held else "")


def _unused(columns: Sequence[str], loss_fn: nn.Module, dataset: RowDataset) -> Iterator[Problem]:
    brought = dataset.columns if isinstance(dataset, WithEmptyRow) else ()
    for name in brought:
        if name == WEIGHTS and name not in columns:
            message = f"{type(loss_fn).__name__} takes no weights, and the data has some, of tokens or of sources"
            yield Problem(message, path="dataset", hint=f"write loss_fn.token_weights: {WEIGHTS}")
        elif name not in columns:
            message = f"{type(loss_fn).__name__} takes no column {name!r}, which the dataset's `columns` asks for"
            taken = ", ".join(columns) or "none"
            hint = did_you_mean(name, columns) or "leave it out, or let the loss declare it"
            yield Problem(f"{message}; it takes: {taken}", path="dataset", hint=hint)


def _fault(value: Any, length: int) -> str | None:
    try:
        array = np.asarray(value)
    except ValueError:
        return "is no array"
    if array.dtype.kind not in _NUMERIC:
        return f"holds {array.dtype}, not numbers"
    if array.shape != (length,):
        return f"has the shape {array.shape}, not that of the row, {(length,)}"
    return None
