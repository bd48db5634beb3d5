"""Two questions put to the finished model before training, since a wrong answer would train on silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hp_core.errors import InputError, Problem
from hp_core.training.evaluation import evaluating

_LENGTH = 8


def check_isolation(model: nn.Module, device: torch.device) -> None:
    """Refuse a model that lets a packed document see the one before it.

    transformers isolates packed documents by their restarting positions; a family that ignores positions (ALiBi,
    state-space models) does not. Another first document must not change the logits of the second. Every rank calls
    it: with sharded weights the forward pass is a collective.

    Raises:
        InputError: it does.
    """
    positions = torch.arange(_LENGTH, device=device).repeat(2)[None]
    logits = []
    with evaluating(model):
        for first in (1, 2):
            ids = torch.full((1, 2 * _LENGTH), first, device=device)
            ids[0, _LENGTH:] = torch.arange(_LENGTH, device=device)
            logits.append(model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, _LENGTH:])
    difference = float((logits[0] - logits[1]).abs().max())
    # The same shapes are computed twice: what rounding leaves is a few units in the last place.
    if difference > 32 * torch.finfo(logits[0].dtype).eps * float(logits[0].abs().max()):
        raise InputError(
            Problem(
                f"{type(model).__name__} does not keep packed documents apart: another first document changes the "
                f"logits of the second by {difference:.2g}",
                path="model",
                hint="this trainer packs documents, so it needs a family whose attention follows position_ids",
            )
        )


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
