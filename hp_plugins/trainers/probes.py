"""Questions put to the finished model and loss before training, since a wrong answer would train on silently."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from hp_core.config import TrainerConfig
from hp_core.data.protocols import RowDataset
from hp_core.errors import InputError, Problem
from hp_core.parallel.agreement import gathered
from hp_core.parallel.setup import DistributedSetup
from hp_core.plugins import Plugins
from hp_core.training.accounting import by_name
from hp_core.training.evaluation import evaluating
from hp_core.training.loss import IGNORE_INDEX, LossContract
from hp_core.training.loss_check import Run, diagnose
from hp_core.training.restoring import restored
from hp_core.training.stand_in import try_loss
from hp_core.training.state import random_state, restore_random_state, seed_everything

_LENGTH = 8


def check_call(model: nn.Module) -> None:
    """Refuse a model that can't be called with what this trainer has to give.

    Raises:
        InputError: its `forward` lacks one of the arguments.
    """
    parameters = inspect.signature(model.forward).parameters
    is_open = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    missing = [name for name in ("input_ids", "position_ids", "labels", "use_cache") if name not in parameters]
    if missing and not is_open:
        message = f"{type(model).__name__}.forward takes no {', '.join(missing)}"
        raise InputError(Problem(message, path="model", hint="this trainer calls it like a causal language model"))


def require_positions(model_inputs: Mapping[str, Any]) -> None:
    """Refuse a loss or plugin that keeps the positions from the model, which tell packed documents apart.

    Raises:
        InputError: what `prepare_model_inputs` gave has no `position_ids`.
    """
    if "position_ids" not in model_inputs:
        message = "prepare_model_inputs drops 'position_ids', so packed documents would see each other"
        raise InputError(Problem(message, path="loss_fn", hint="return the other inputs as they are"))


def check_isolation(model: nn.Module, device: torch.device) -> None:
    """Refuse a model that lets a packed document see the one before it.

    transformers isolates packed documents by their restarting positions; a family that ignores positions (ALiBi,
    state-space models) does not. Another first document must not change the logits of the second, as it does where
    the positions say that both are one. Every rank calls it: with sharded weights a forward pass is a collective.

    Raises:
        InputError: it does, or the logits are not finite.
    """
    with evaluating(model):
        leak, attention = (_influence(model, positions) for positions in _apart_and_together(device))
    # Rounding alone stays far below what one document does to another when they are meant to be one.
    if not leak <= attention / 4:
        raise InputError(
            Problem(
                f"{type(model).__name__} does not keep packed documents apart: another first document changes the "
                f"logits of the second by {leak:.2g} (by {attention:.2g} where they are one document)",
                path="model",
                hint="this trainer packs documents, so it needs a family whose attention follows position_ids",
            )
        )


def check_loss_isolation(
    loss_fn: nn.Module, model: nn.Module, contract: LossContract, run: Run, dataset: RowDataset
) -> None:
    """Refuse a loss in which packed documents see each other, as they may in a model of its own (a teacher).

    Every rank calls it. The arguments are those of `check_loss`.

    Raises:
        InputError: another first document changes the loss of the second.
    """
    labels = torch.where(torch.arange(2 * _LENGTH) < _LENGTH, IGNORE_INDEX, torch.arange(2 * _LENGTH) % 5 + 1)[None]
    columns = {name: labels if name.endswith("_labels") else torch.ones(labels.shape) for name in contract.columns} | {
        name: array.repeat(2)[None] for name, array in _whole_numbers(dataset, contract).items()
    }

    def value(positions: torch.Tensor, first: int) -> float:
        batch = {"input_ids": _ids(positions, first), "position_ids": positions, "labels": labels, **columns}
        with restored(loss_fn, apart_from=model):
            seed_everything(0, 0)
            returned, _ = run({name: one.clone() for name, one in batch.items()})
        return sum(float(one.sum()) for name, one in by_name(returned).items() if name not in contract.diagnostics)

    with evaluating(model, loss_fn):
        leak, attention = (
            abs(value(positions, 1) - value(positions, 2)) for positions in _apart_and_together(torch.device("cpu"))
        )
    # The attention is that of all models that the loss is made of, the leak of one of them.
    if leak > attention / 16:
        raise InputError(
            Problem(
                f"{type(loss_fn).__name__} does not keep packed documents apart: another first document changes the "
                f"loss of the second by {leak:.2g} (by {attention:.2g} where they are one document)",
                path="loss_fn",
                hint="a model inside the loss needs attention that follows position_ids, too",
            )
        )


def _apart_and_together(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of two packed documents, and of one document that is as long."""
    apart = torch.arange(_LENGTH, device=device).repeat(2)[None]
    return apart, torch.arange(2 * _LENGTH, device=device)[None]


def _ids(positions: torch.Tensor, first: int) -> torch.Tensor:
    """Tokens, in the first half of which all are `first`."""
    ids = torch.full_like(positions, first)
    ids[0, _LENGTH:] = torch.arange(_LENGTH, device=positions.device)
    return ids


def _influence(model: nn.Module, positions: torch.Tensor) -> float:
    """How much other tokens in the first half change the logits of the second; not a number if those are not."""
    logits = [
        model(input_ids=_ids(positions, first), position_ids=positions, use_cache=False).logits[0, _LENGTH:].float()
        for first in (1, 2)
    ]
    return float((logits[0] - logits[1]).abs().max())


def check_shift(run: Callable[[dict[str, Any]], tuple[Any, bool]], device: torch.device) -> None:
    """Refuse a model that shifts labels which are shifted already, when its own loss is the one to be trained.

    Args:
        run: calls the model on a batch, without gradients; also says whether it was given the labels.
        device: where the batch goes.

    Raises:
        InputError: its loss is the one of labels shifted twice.
    """
    ids = torch.arange(_LENGTH)[None]
    labels = (ids * 5 + 3) % 7
    output, sees_labels = run({"input_ids": ids, "position_ids": ids.clone(), "labels": labels})
    if not sees_labels or not isinstance(getattr(output, "loss", None), torch.Tensor):
        return
    logits, labels = output.logits[0].float(), labels[0].to(device)
    once, twice = F.cross_entropy(logits, labels), F.cross_entropy(logits[:-1], labels[1:])
    if torch.isclose(output.loss, twice, rtol=1e-4) and not torch.isclose(output.loss, once, rtol=1e-4):
        raise InputError(
            Problem(
                "the model's own loss shifts labels that are shifted already",
                path="model",
                hint="write loss_fn: causal_lm, which computes the loss from the logits",
            )
        )


def check_loss(
    loss_fn: nn.Module,
    model: nn.Module,
    contract: LossContract,
    run: Run,
    dataset: RowDataset,
    setup: DistributedSetup,
) -> tuple[Problem, ...]:
    """Refuse a loss that does something else than it declares; return what may be wrong with it.

    Every rank calls it, and every rank gets the same answer.

    Args:
        loss_fn: the loss, bound to the model.
        model: the finished model.
        contract: what the loss declares.
        run: calls both on a tiny batch, as a step does.
        dataset: its first row tells what columns of whole numbers may hold.
        setup: the run's ranks.

    Raises:
        InputError: with everything that is wrong.
    """
    found = diagnose(
        loss_fn,
        model,
        contract,
        run,
        fixed=_whole_numbers(dataset, contract),
        backward=False,  # with sharded weights it would write gradients
        tells_targets_apart=_tells_targets_apart(model, setup.device),
    )
    answers = gathered(found, setup)
    for answer in answers:
        if answer.errors:
            raise InputError(answer.errors)
    return next((answer.warnings for answer in answers if answer.warnings), ())


def try_alone(config: TrainerConfig, plugins: Plugins, setup: DistributedSetup) -> list[str]:
    """What `check_loss` finds on a tiny model of the recipe's family, which every rank has to itself.

    Raises:
        InputError: with everything that is wrong.
    """
    random = random_state()
    trial = try_loss(config, plugins, setup)
    restore_random_state(random)
    if trial.diagnosis.errors:
        raise InputError(trial.diagnosis.errors)
    not_tried = [] if trial.not_tried is None else [f"loss_fn: not tried: {trial.not_tried}"]
    return [*not_tried, *map(str, trial.diagnosis.warnings)]


def _whole_numbers(dataset: RowDataset, contract: LossContract) -> dict[str, torch.Tensor]:
    """The columns of the first row that hold whole numbers, such as numbers of domains, cut to the tiny rows."""
    if not contract.columns:
        return {}
    row: Mapping[str, Any] = dataset[0]  # type: ignore[assignment]  # a dataset may add columns to its rows
    arrays = {name: np.asarray(row[name]) for name in contract.columns if not name.endswith("_labels")}
    whole = {name: array for name, array in arrays.items() if array.dtype.kind in "biu"}
    return {name: torch.from_numpy(np.resize(array, _LENGTH)) for name, array in whole.items()}


def _tells_targets_apart(model: nn.Module, device: torch.device) -> bool:
    """Whether different targets cost different amounts; not so while the output head is zero."""
    positions = torch.arange(_LENGTH, device=device)[None]
    with evaluating(model):
        logits = model(input_ids=positions, position_ids=positions, use_cache=False).logits[0, :, :_LENGTH].float()
    spread = float((logits.max(-1).values - logits.min(-1).values).min())
    return spread > 1e-3 * max(1.0, float(logits.abs().max()))
