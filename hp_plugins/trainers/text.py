"""Training causal language models on packed text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hp_core.data.protocols import EMPTY_ROW, Datasets, Tokenizer
from hp_core.errors import InputError, Problem, RunError
from hp_core.model.vocabulary import check_vocabulary
from hp_core.training.accounting import MicroBatch
from hp_core.training.base import BaseTrainer
from hp_core.training.columns import column_arguments, empty_columns
from hp_core.training.evaluation import Evaluation, evaluating
from hp_core.training.startup import told_of_the_loss
from hp_plugins.collators.rows import rows
from hp_plugins.trainers.probes import (
    check_call,
    check_isolation,
    check_loss,
    check_loss_isolation,
    check_shift,
    require_positions,
    try_alone,
)
from hp_plugins.trainers.sampling import write_samples

# What the loader's batches hold beside the label tensors and whatever a dataset adds.
_MODEL_FIELDS = ("input_ids", "position_ids")


class TextTrainer(BaseTrainer):
    """Next-token training: a tokenizer, packed rows, and samples of text at the end."""

    trains_texts = True

    def _build_model_assets(self) -> None:
        tokenizer = self.config.dataset.tokenizer
        self.tokenizer = tokenizer.build() if tokenizer is not None else None

    def _build_loss(self) -> None:
        if self.setup.sizes.pp > 1:
            # No rank has both the tokens and the loss. Before the loss of the run is bound: the last model counts.
            self._say(try_alone(self.config, self.run.plugins, self.setup))
        super()._build_loss()

    def _say(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.run.console.say(line)

    def _build_dataset(self) -> None:
        super()._build_dataset()
        self.tokenizer = self.datasets.tokenizer or self.tokenizer
        _check_labels(self.datasets)
        check_call(self.model)
        if isinstance(self.tokenizer, Tokenizer):
            check_vocabulary(self.model, self.tokenizer)
        check_isolation(self.model, self.setup.device)
        check_shift(self._model_loss, self.setup.device)
        if self.setup.sizes.pp == 1:
            self._say(self._try_loss())
        if self.config.evaluation.samples.prompts and not isinstance(self.tokenizer, Tokenizer):
            raise InputError(Problem("sampling text needs dataset.tokenizer", path="evaluation.samples.prompts"))

    def _try_loss(self) -> list[str]:
        """Refuse a loss that does something else than it declares; return what may be wrong with it."""
        bound = (self.loss_fn, self.model, self.contract, self._tiny_loss, self.datasets.train)
        with told_of_the_loss(f"{type(self.loss_fn).__name__} can't be called on a tiny batch"):
            warnings = check_loss(*bound, self.setup)
            check_loss_isolation(*bound)
        return [str(warning) for warning in warnings]

    def _model_loss(self, batch: dict[str, Any]) -> tuple[Any, bool]:
        """The model's output for a batch, and whether the loss lets the model see the labels."""
        model_inputs, _ = self.preforward(self._probe(batch))
        require_positions(model_inputs)
        with evaluating(self.model):
            return self.forward(model_inputs), "labels" in model_inputs

    def _tiny_loss(self, batch: dict[str, torch.Tensor]) -> tuple[Any, Any]:
        """What the loss returns for a batch, and the model's output."""
        outputs, loss_inputs = self._outputs_of(self._probe(batch))
        return self.postforward(outputs, loss_inputs), outputs

    def _probe(self, batch: dict[str, Any]) -> MicroBatch:
        """A batch made up by a probe, as a micro-batch."""
        # What prepares the model's inputs may use any column, so the batch of a probe holds them too.
        rows, length = batch["labels"].shape
        columns = empty_columns(self.datasets.train, length)
        repeated = {name: value.expand(rows, *value.shape[1:]).clone() for name, value in columns.items()}
        return MicroBatch.of(*get_batch(iter([{**repeated, **batch}])), self.contract)

    def _build_collate_fn(self) -> None:
        collate_fn = self.config.dataloader.collate_fn
        if collate_fn is None:
            self.collate_fn = rows()
        else:
            self.collate_fn = collate_fn.build(
                tokenizer=self.tokenizer,
                max_seq_len=self.datasets.train.max_seq_len,
                mesh_context=self.mesh_context(),
            )

    def _build_get_batch(self) -> None:
        self.get_batch = get_batch
        _check_columns(self.collate_fn, self.datasets, self.contract.columns)

    def _finish(self, evaluation: Evaluation | None) -> Evaluation | None:
        evaluation = super()._finish(evaluation)
        settings = self.config.evaluation.samples
        if settings.prompts:
            write_samples(self.run, self.model, self.tokenizer, settings)
        return evaluation


def get_batch(iterator: Iterator[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The next batch as what the model and what the loss are called with.

    Labels are shifted already, so the model gets them as `shift_labels` too: it must not shift them again. No
    attention mask and no cache: transformers then isolates packed documents by their restarting positions.
    """
    batch = next(iterator)
    loss_inputs = {name: value for name, value in batch.items() if name not in _MODEL_FIELDS}
    model_inputs = {name: batch[name] for name in _MODEL_FIELDS}
    labels = batch["labels"]
    return {**model_inputs, "labels": labels, "shift_labels": labels, "use_cache": False}, loss_inputs


def _check_labels(datasets: Datasets) -> None:
    row = datasets.train[EMPTY_ROW]
    tokens, labels = len(row["input_ids"]), len(row["labels"])
    if tokens != labels:
        message = f"its rows have {tokens} tokens and {labels} label{'s' * (labels != 1)}, not one for each"
        raise InputError(Problem(message, path="dataset", hint="name the trainer that goes with the data"))


def _check_columns(collate_fn: Any, datasets: Datasets, columns: Sequence[str]) -> None:
    """Refuse a collator that drops a column which the loss takes, before the first step does."""
    if columns:
        _, loss_inputs = get_batch(iter([collate_fn([datasets.train[0]])]))
        try:
            column_arguments(loss_inputs, columns)
        except RunError as error:
            raise InputError(Problem(str(error), path="dataloader.collate_fn")) from error
