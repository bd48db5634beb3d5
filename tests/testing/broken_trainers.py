"""Trainers that each break one promise, and one that keeps them all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from hp_plugins.trainers.text import TextTrainer

IGNORED = -100


class Plain(TextTrainer):
    """Keeps every promise."""


class _OwnBatch(TextTrainer):
    def _build_get_batch(self) -> None:
        super()._build_get_batch()
        self._theirs = self.get_batch
        self.get_batch = self.next_batch

    def next_batch(self, iterator: Iterator[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        model_inputs, loss_inputs = self._theirs(iterator)
        labels = self.labels_of(model_inputs, loss_inputs)
        return {**model_inputs, "labels": labels, "shift_labels": labels}, {**loss_inputs, "labels": labels}

    def labels_of(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> torch.Tensor:
        raise NotImplementedError


class DividesByRows(TextTrainer):
    """A mean over the rows of a micro-batch on top of that of the loss."""

    def postforward(self, outputs: Any, loss_inputs: dict[str, Any]) -> Any:
        return super().postforward(outputs, loss_inputs) / len(loss_inputs["labels"])


class DrawsAtRandom(_OwnBatch):
    """Leaves out targets by the global random stream."""

    def labels_of(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> torch.Tensor:
        labels = loss_inputs["labels"]
        return torch.where(torch.rand(labels.shape) < 0.3, IGNORED, labels)


class Remembers(_OwnBatch):
    """Leaves out more targets the more batches it has seen."""

    seen = 0

    def labels_of(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> torch.Tensor:
        self.seen += 1
        labels = loss_inputs["labels"].clone()
        labels[:, : self.seen % 5] = IGNORED
        return labels


class TrainsOnPadding(_OwnBatch):
    """Makes every position of a row a target, those of empty rows too."""

    def labels_of(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> torch.Tensor:
        return model_inputs["input_ids"].roll(-1, 1)


class TakesTwo(TextTrainer):
    """Reads ahead."""

    def _build_get_batch(self) -> None:
        super()._build_get_batch()
        theirs = self.get_batch

        def both(iterator: Iterator[Any]) -> Any:
            found = theirs(iterator)
            next(iterator, None)
            return found

        self.get_batch = both


class LosesTheGraph(TextTrainer):
    """The loss has a value and no gradient."""

    def postforward(self, outputs: Any, loss_inputs: dict[str, Any]) -> Any:
        return super().postforward(outputs, loss_inputs) * 0.0


class CountsEvaluations(TextTrainer):
    """Weighs steps less after each evaluation."""

    divisor = 1

    def _evaluate(self, *arguments: Any, **named: Any) -> Any:
        found = super()._evaluate(*arguments, **named)
        self.divisor += 1
        return found

    def postforward(self, outputs: Any, loss_inputs: dict[str, Any]) -> Any:
        return super().postforward(outputs, loss_inputs) / self.divisor


class DependsOnTheRank(TextTrainer):
    """Trains the second rank's rows twice as hard."""

    def postforward(self, outputs: Any, loss_inputs: dict[str, Any]) -> Any:
        return super().postforward(outputs, loss_inputs) * (1 + self.setup.rank)


class DropsPositions(TextTrainer):
    """Lets the model number the tokens of a row, over all its documents."""

    def _build_get_batch(self) -> None:
        super()._build_get_batch()
        theirs = self.get_batch

        def without(iterator: Iterator[Any]) -> Any:
            model_inputs, loss_inputs = theirs(iterator)
            del model_inputs["position_ids"]
            return model_inputs, loss_inputs

        self.get_batch = without


class DividesByLength(TextTrainer):
    """Weighs tokens less the longer the longest row of a micro-batch is."""

    def postforward(self, outputs: Any, loss_inputs: dict[str, Any]) -> Any:
        return super().postforward(outputs, loss_inputs) / loss_inputs["labels"].shape[1]


class Alternates(TextTrainer):
    """Weighs every second step less."""

    steps = 0

    def train_step(self, iterator: Iterator[Any]) -> None:
        self.steps += 1
        super().train_step(iterator)

    def postforward(self, outputs: Any, loss_inputs: dict[str, Any]) -> Any:
        return super().postforward(outputs, loss_inputs) / (1 + self.steps % 2)


class AlternatesAsAClass(TextTrainer):
    """Weighs one of four steps less, of all that its process has ever taken."""

    steps: ClassVar[list[int]] = []

    def train_step(self, iterator: Iterator[Any]) -> None:
        self.steps.append(1)
        super().train_step(iterator)

    def postforward(self, outputs: Any, loss_inputs: dict[str, Any]) -> Any:
        return super().postforward(outputs, loss_inputs) / (1 + (len(self.steps) % 4 == 2))


class SharpensLogits(TextTrainer):
    """Doubles the logits by a hook, which no file of the model tells of."""

    def _build_model(self) -> None:
        super()._build_model()
        self.model.lm_head.register_forward_hook(lambda module, arguments, output: 2 * output)


class HidesItsModel(TextTrainer):
    """Trains a model of a class that transformers doesn't have."""

    def _build_model(self) -> None:
        super()._build_model()
        kind = type(self.model)
        self.model.__class__ = type(f"Own{kind.__name__}", (kind,), {})


class MovesAtOnce(TextTrainer):
    """Scales the model's head before the first step."""

    def train_step(self, iterator: Iterator[Any]) -> None:
        if self.run.state.step == 0:
            with torch.no_grad():
                self.model.lm_head.weight.mul_(0.5)
        super().train_step(iterator)
