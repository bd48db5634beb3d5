"""The task: what a batch is, and what doesn't go with it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from hp_core import BaseTrainer, InputError, Problem
from hp_core.training.startup import told_of_the_loss
from hp_plugins.collators.rows import rows


class ClassificationTrainer(BaseTrainer):
    """Trains a classifier on rows of one label each."""

    def _setup(self) -> None:
        super()._setup()
        sizes = self.setup.sizes
        for key, size in (("cp_size", sizes.cp), ("pp_size", sizes.pp)):
            if size > 1:
                message = f"{size} can't be: a text and its one label stay together"
                raise InputError(Problem(message, path=f"accelerator.{key}", hint=f"write {key}: 1"))

    def _build_loss(self) -> None:
        super()._build_loss()
        device, size = self.setup.device, self.model.config.num_labels
        outputs = SimpleNamespace(logits=torch.zeros(2, size, device=device, requires_grad=True))
        wanted = "a loss of one label for each text; write loss_fn: hp-classifier:classification"
        with told_of_the_loss(f"{type(self.loss_fn).__name__} is not {wanted}"):
            self.loss_fn(model_output=outputs, labels=torch.zeros(2, 1, dtype=torch.int64, device=device))

    def _build_model_assets(self) -> None:
        if self.config.dataset.tokenizer is None:
            raise InputError(Problem("is missing", path="dataset.tokenizer", hint="write tokenizer: bytes, for one"))
        self.tokenizer = self.config.dataset.tokenizer.build()

    def _build_dataset(self) -> None:
        super()._build_dataset()
        wanted = list(self.model.config.id2label.values())
        found = self.config.dataset.source.arguments.get("labels", wanted)
        if list(found) != wanted:
            message = f"the data set has the labels {', '.join(found)}, the model {', '.join(wanted)}"
            raise InputError(Problem(message, path="dataset.labels", hint="give both the same list"))

    def _build_collate_fn(self) -> None:
        # Nothing that a recipe says is without effect.
        if self.config.dataloader.collate_fn is not None:
            message = "a classifier's rows are put together in one way"
            raise InputError(Problem(message, path="dataloader.collate_fn", hint="remove it"))
        if self.config.evaluation.samples.prompts:
            message = "a classifier writes no text"
            raise InputError(Problem(message, path="evaluation.samples.prompts", hint="remove them"))
        self.collate_fn = rows()

    def _build_get_batch(self) -> None:
        self.get_batch = get_batch


def get_batch(iterator: Iterator[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The next batch as what the model and what the loss are called with."""
    batch = next(iterator)
    mask = ~batch["is_padding"]
    # A row without any token, which a rank has when texts run out, would make attention divide by zero.
    mask[:, 0] = True
    model_inputs = {"input_ids": batch["input_ids"], "attention_mask": mask.long(), "use_cache": False}
    return model_inputs, {name: batch[name] for name in ("labels", "is_padding", "sample_ids")}
