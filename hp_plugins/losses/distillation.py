"""Distillation from a teacher model, computed in the heads of both models for some tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import nn

from hp_core import Target
from hp_core.config.nested import ComponentOf
from hp_core.errors import InputError, Problem, RunError
from hp_core.training.loss import IGNORE_INDEX
from hp_plugins.losses.chunk_size import Chunks, ChunkSize, MemoryBudget
from hp_plugins.losses.chunked import ChunkedHeadLoss
from hp_plugins.losses.divergence import Direction, Divergence
from hp_plugins.losses.head import LossHead, measure_transform
from hp_plugins.losses.in_head import HeadCall, answered
from hp_plugins.losses.logits import LogitTransform
from hp_plugins.losses.router import RouterBalance, RouterZLoss
from hp_plugins.losses.targets import IgnoreIndex, Targets, TokenWeights
from hp_plugins.losses.teacher import Teacher, TeacherLogits
from hp_plugins.losses.token_loss import TokenLoss

# Logits of both models, and what the divergence takes beside them.
_NUM_BUFFERS = 4

TeacherModel = Annotated[Target, ComponentOf("hp.models"), Field(description="The model to learn from.")]
DirectionOf = Annotated[
    Direction, Field(description="forward: KL(teacher || student); reverse: KL(student || teacher).")
]
Temperature = Annotated[float, Field(gt=0, description="Divides the logits of both models in the divergence.")]
KlWeight = Annotated[
    float, Field(ge=0, le=1, description="Share of the divergence in the loss; the cross entropy has the rest.")
]


class DistillationLoss(TokenLoss):
    """The divergence from a teacher's distribution over the next token, and cross entropy, summed over the targets.

    `Divergence` is its formula. The full logits of neither model are ever held: the loss is computed in the student's
    head, with its gradients, from the hidden states of both. It returns `loss` and two entries that are only logged:
    `kl_divergence`, of the softened distributions and without the square of the temperature, and `cross_entropy`.

    The losses of the student's routers are terms of the step; see `RouterLosses`. The teacher is no part of the loss's
    state, so no checkpoint holds it.
    """

    withholds_logits = True
    diagnostics = ("kl_divergence", "cross_entropy")

    def __init__(
        self,
        teacher: TeacherModel,
        direction: DirectionOf = "forward",
        temperature: Temperature = 1.0,
        kl_weight: KlWeight = 0.5,
        ignore_index: IgnoreIndex = IGNORE_INDEX,
        token_weights: TokenWeights = None,
        router_balance: RouterBalance = None,
        router_z_loss: RouterZLoss = 0.0,
        chunk_size: ChunkSize = "auto",
        memory_budget_mib: MemoryBudget = None,
    ) -> None:
        super().__init__(ignore_index, token_weights, router_balance, router_z_loss)
        self._teacher = teacher
        self._divergence = Divergence(direction, temperature, kl_weight)
        self._chunks = Chunks(chunk_size, memory_budget_mib)
        self._bound: _Bound | None = None
        self._pending: HeadCall | None = None

    def bind_model(self, model: nn.Module, distributed_setup: Any) -> None:
        """Build the teacher, and take the place of the `forward` of both heads. Every rank calls it.

        Raises:
            InputError: the teacher can't be built, the vocabularies differ, one of the heads is of another kind, or the
                memory budget is less than a token takes.
        """
        super().bind_model(model, distributed_setup)
        if distributed_setup.sizes.pp > 1:
            message = "a teacher can't be cut into stages with its student in this version"
            raise InputError(Problem(message, path="loss_fn", hint="remove accelerator.pp_size"))
        head = LossHead.of(model)
        transform = measure_transform(model, head)
        chunk_size = self._chunks.num_tokens(head.head.weight, transform, _NUM_BUFFERS)
        teacher = Teacher.build(self._teacher, distributed_setup)
        if teacher.num_classes != head.head.out_features:
            message = f"has a vocabulary of {teacher.num_classes}, the model one of {head.head.out_features}"
            hint = "a teacher of the same tokenizer and vocabulary size is needed"
            raise InputError(self._teacher.problem("", message, hint))
        self._pending = None
        self._bound = _Bound(head, transform, chunk_size, teacher.logits_for, teacher.release)

    def prepare_model_inputs(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> dict[str, Any]:
        """Run the teacher, and hand its hidden states and the labels to the head, for the model's next call."""
        bound = self._require_bound()
        inputs = super().prepare_model_inputs(model_inputs, loss_inputs)
        teacher = bound.run_teacher(inputs)
        labels = loss_inputs["labels"]
        if teacher.hidden.shape[:-1] != labels.shape:
            raise RunError(
                f"loss_fn: the teacher's head is called for {tuple(teacher.hidden.shape[:-1])} tokens, the labels are "
                f"for {tuple(labels.shape)}"
            )

        def compute(hidden: torch.Tensor, head: nn.Linear, targets: Targets) -> tuple[torch.Tensor, torch.Tensor]:
            objective = _TowardsTeacher(self._divergence, teacher)
            loss = ChunkedHeadLoss(objective, bound.transform, bound.chunk_size, "distillation")
            found = loss(hidden, head.weight, head.bias, targets, teacher.hidden.flatten(0, -2))
            bound.release_teacher()
            return found

        columns = {name: loss_inputs[name] for name in self.columns}
        self._pending = HeadCall(self._supervision, labels, columns, compute)
        bound.head.ask(self._pending.answer)
        return inputs

    def forward(self, *, model_output: Any, labels: torch.Tensor, **columns: torch.Tensor) -> dict[str, torch.Tensor]:
        """The summed `loss`, `kl_divergence` and `cross_entropy`, scalars in fp32, or in float64 for such a model.

        Args:
            model_output: of the call whose inputs `prepare_model_inputs` prepared.
            labels: the same that it was given; so are the columns.

        Raises:
            RunError: the labels are others, or the model did not call its head.
        """
        del columns
        bound, pending, self._pending = self._require_bound(), self._pending, None
        loss, divergence, cross_entropy = answered(pending, labels, "distillation computes within it")
        loss = loss + model_output.logits.sum() / bound.transform.scale
        return {"loss": loss, "kl_divergence": divergence, "cross_entropy": cross_entropy}

    def _require_bound(self) -> _Bound:
        if self._bound is None:
            raise RunError("loss_fn: bind_model was not called; distillation computes within the model's head")
        return self._bound


@dataclass(frozen=True)
class _Bound:
    """What a loss knows of both models. The teacher is behind functions: it is no part of what the loss remembers."""

    head: LossHead
    transform: LogitTransform
    chunk_size: int
    run_teacher: Callable[[dict[str, Any]], TeacherLogits]
    release_teacher: Callable[[], None]


@dataclass(frozen=True)
class _TowardsTeacher:
    """The divergence of some tokens, given the teacher's hidden states of them."""

    divergence: Divergence
    teacher: TeacherLogits
    shape: ClassVar[tuple[int, ...]] = (3,)

    def total_and_gradient_(
        self, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None, hidden: torch.Tensor
    ) -> torch.Tensor:
        """The sums of loss, divergence and cross entropy; see `ChunkObjective`. `hidden` are the teacher's."""
        return self.divergence.sums_and_gradient_(logits, self.teacher.of(hidden, logits.dtype), targets, weights)
