"""The task: what a batch is, what both models make of it, and what doesn't go with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import torch
from pydantic import Field

from hp_core import BaseTrainer, InputError, Problem, TrainerConfig
from hp_core.model.vocabulary import check_vocabulary
from hp_core.training.accounting import MicroBatch
from hp_core.training.evaluation import Evaluation
from hp_core.training.startup import told_of_the_loss
from hp_core.training.state import random_state
from hp_dpo.loss import PairLogProbs
from hp_dpo.reference import Reference, answer_log_probs
from hp_plugins.collators.rows import rows
from hp_plugins.trainers.probes import check_isolation
from hp_plugins.trainers.sampling import write_samples


class DpoTrainer(BaseTrainer):
    """Trains a policy on rows of one pair each, beside a reference that stays as it is."""

    def __init__(
        self,
        reference: Annotated[
            str | None,
            Field(description="Directory or hub id of the reference; null is the policy before training."),
        ] = None,
        *,
        config: TrainerConfig,
    ) -> None:
        super().__init__(config=config)
        self._path = reference

    def _setup(self) -> None:
        super()._setup()
        sizes, collate_fn = self.setup.sizes, self.config.dataloader.collate_fn
        loss_parallel = str(self.config.accelerator.loss_parallel).lower()
        settings = (
            ("accelerator.cp_size", sizes.cp, 1, "both answers of a pair stay together"),
            ("accelerator.pp_size", sizes.pp, 1, "both models stay whole"),
            ("accelerator.loss_parallel", loss_parallel, "false", "log-probabilities are of whole logits"),
            ("dataloader.collate_fn", collate_fn and collate_fn.spelling, None, "pairs are put together in one way"),
        )
        refused = [(key, f"{value} can't be: {why}") for key, value, default, why in settings if value != default]
        if refused:
            raise InputError([Problem(message, path=key, hint="remove it") for key, message in refused])

    def _build_model(self) -> None:
        drawn = random_state()
        super()._build_model()
        self.reference = Reference.of(self.run, self.model, self._path, self.config.trainer, drawn)

    def _build_loss(self) -> None:
        super()._build_loss()
        one = torch.zeros(1, 2, device=self.setup.device)
        labels = torch.zeros(1, 1, dtype=torch.int64, device=self.setup.device)
        with told_of_the_loss(f"{type(self.loss_fn).__name__} is no loss of pairs; write loss_fn: hp-dpo:dpo"):
            found = self.loss_fn(model_output=PairLogProbs(one.clone().requires_grad_(), one), labels=labels)
        if self.contract.reduction != "sample" or found is None:
            message = f"{type(self.loss_fn).__name__} gives no value for each pair"
            raise InputError(Problem(message, path="loss_fn", hint="write loss_fn: hp-dpo:dpo"))

    def _build_model_assets(self) -> None:
        if self.config.dataset.tokenizer is None:
            raise InputError(Problem("is missing", path="dataset.tokenizer", hint="write tokenizer: bytes, for one"))
        self.tokenizer = self.config.dataset.tokenizer.build()

    def _build_dataset(self) -> None:
        super()._build_dataset()
        self.tokenizer = self.datasets.tokenizer or self.tokenizer
        if "answers" not in self.datasets.train[0]:
            message = "its rows are no pairs: they have no array 'answers'"
            raise InputError(Problem(message, path="dataset", hint="write name: hp-dpo:preferences"))
        check_vocabulary(self.model, self.tokenizer)
        check_isolation(self.model, self.setup.device)
        if self._path is not None:
            self.reference.require_isolation(self.setup.device, self.config.trainer)

    def _build_collate_fn(self) -> None:
        self.collate_fn = rows()

    def _build_get_batch(self) -> None:
        self.get_batch = get_batch

    def preforward(self, micro_batch: MicroBatch) -> tuple[dict[str, Any], dict[str, Any]]:
        """Add what the reference says of the answers."""
        model_inputs, loss_inputs = super().preforward(micro_batch)
        return model_inputs, {**loss_inputs, "reference": self.reference.log_probs(model_inputs, loss_inputs)}

    def postforward(self, outputs: Any, loss_inputs: dict[str, Any]) -> Any:
        """Call the loss with the log-probabilities of the answers, where other trainers give it logits."""
        pairs = PairLogProbs(answer_log_probs(outputs.logits, loss_inputs), loss_inputs["reference"])
        return self.loss_fn(model_output=pairs, labels=loss_inputs["labels"])

    def _finish(self, evaluation: Evaluation | None) -> Evaluation | None:
        evaluation = super()._finish(evaluation)
        if self.config.evaluation.samples.prompts:
            write_samples(self.run, self.model, self.tokenizer, self.config.evaluation.samples)
        return evaluation


def get_batch(iterator: Iterator[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The next batch as what the models and what the loss are called with.

    Without an attention mask, the two texts of a row are kept apart by their positions.
    """
    batch = next(iterator)
    model_inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
    return model_inputs, {name: batch[name] for name in ("labels", "answers", "is_padding", "sample_ids")}
