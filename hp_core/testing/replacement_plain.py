"""What a model computes before anything in it is replaced, and what every model of its kind shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hp_core.parallel.setup import DistributedSetup
from hp_core.testing.models import tiny_batch
from hp_core.testing.replacement_steps import (
    Numbers,
    ReplacementCase,
    checkpoint_of,
    definitions_of,
    logits_of,
    numbers_of,
    reloaded,
)
from hp_core.testing.setups import tiny_setup
from hp_core.training.loss import IGNORE_INDEX

# Where the second text of a row begins, and how many positions of padding the rows begin with.
_SECOND_TEXT, _PADDING = 7, (0, 3, 1, 5)


@dataclass(frozen=True)
class Mode:
    """A way to call a model in which it computes something else than in others; `how` says which in messages."""

    how: str
    batch: Mapping[str, torch.Tensor]
    training: bool = False

    def numbers(self, model: PreTrainedModel, setup: DistributedSetup) -> Numbers:
        """What the model computes of the batch; dropout draws from the same seed each time."""
        with torch.random.fork_rng(devices=[]):
            model.train(self.training)
            found = numbers_of(model, self.batch, setup, seed=0)
            model.eval()
        return found


def modes_of(family: str) -> list[Mode]:
    """Evaluation, training, padding on the left, and where positions are numbers of a text also packed rows."""
    batch = tiny_batch(family)
    modes = [Mode("", batch), Mode(" in training mode", batch, training=True)]
    if "position_ids" in batch:
        length = batch["input_ids"].shape[1]
        positions = torch.arange(length).where(torch.arange(length) < _SECOND_TEXT, torch.arange(length) - _SECOND_TEXT)
        packed = {**batch, "position_ids": positions.expand_as(batch["input_ids"]).clone()}
        modes.append(Mode(" with two texts in a row, told apart by position_ids alone,", packed))
    modes.append(Mode(" with an attention_mask for padding on the left", _padded(batch)))
    return modes


def _padded(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mask = torch.ones_like(batch["input_ids"])
    for row, count in enumerate(_PADDING):
        # The image of a vision-language model begins at the second position.
        mask[row, : count if "position_ids" in batch else min(count, 1)] = 0
    padded = {**batch, "attention_mask": mask, "labels": batch["labels"].where(mask == 1, IGNORE_INDEX)}
    if "position_ids" in batch:
        padded["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return padded


@dataclass(frozen=True)
class Plain:
    """The original: a model, its definitions, and what it computes; all from before a factory was called.

    A factory that patches a class for good, each time in the same way, shows only against these.
    """

    model: PreTrainedModel
    definitions: Mapping[str, Any]
    logits: torch.Tensor
    halved: torch.Tensor
    numbers: tuple[tuple[Mode, Numbers], ...]

    @classmethod
    def of(cls, case: ReplacementCase) -> Plain:
        """Build the model of a case, call its factory never."""
        with tiny_setup() as setup, checkpoint_of(case.family) as files:
            first = reloaded(files)
            definitions = definitions_of(first)
            batch = tiny_batch(case.family)
            model, _ = case.build(setup, replaced=False, files=files)
            numbers = tuple((mode, mode.numbers(model, setup)) for mode in modes_of(case.family))
            nn.Module.to(model, torch.bfloat16)
            return cls(first, definitions, logits_of(first, batch), logits_of(model, halved(batch)), numbers)


def halved(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch for a model of bf16 weights."""
    return {name: value.bfloat16() if value.is_floating_point() else value for name, value in batch.items()}
