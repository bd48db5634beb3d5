"""A frozen model whose hidden states and head stand for the logits of every token, without ever holding them all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hp_core import Target
from hp_core.errors import InputError
from hp_core.parallel.context.attention import require_context_attention
from hp_core.parallel.fsdp import reshard
from hp_core.parallel.setup import DistributedSetup
from hp_core.training.beside import UNTRAINED, frozen_model
from hp_plugins.losses.head import LossHead, measure_transform
from hp_plugins.losses.logits import LogitTransform


@dataclass(frozen=True)
class TeacherLogits:
    """What gives a teacher's logits for the tokens of one micro-batch.

    `hidden` are (batch, sequence, features); `weight`, (classes, features), and `bias` are whole on every rank.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    transform: LogitTransform

    def of(self, hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The logits in fp32 or float64, (tokens, classes), for some of the hidden states, (tokens, features)."""
        weight = self.weight
        if weight.device.type == "cpu" or dtype == torch.float64:
            # Products of a CPU accumulate and end in the dtype of their factors.
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        # `out_dtype` is for factors of fewer bits.
        wide: dict[str, Any] = {} if weight.dtype == dtype else {"out_dtype": dtype}
        logits = torch.mm(hidden.to(weight.dtype), weight.t(), **wide)
        if self.bias is not None:
            logits += self.bias
        # A transform may need a place for its derivative, which is of no use here.
        self.transform.apply_(logits, None if self.transform.softcap is None else torch.empty_like(logits))
        return logits


class Teacher:
    """A model in evaluation mode, without gradients, sharded like the model that learns from it."""

    def __init__(self, model: nn.Module, head: LossHead, transform: LogitTransform) -> None:
        self._model = model
        self._head = head
        self._transform = transform

    @classmethod
    def build(cls, target: Target, setup: DistributedSetup) -> Teacher:
        """Build the model that a recipe names. Every rank calls it.

        Raises:
            InputError: it has no plain head, or its logits are more than a scale and a soft cap of the head's output.
        """
        model = frozen_model(lambda own: target.build(distributed_setup=own, **UNTRAINED), setup, target.section)
        require_context_attention(model, setup)
        with told_as(target, "the logits of a teacher are computed from its head, some tokens at a time"):
            head = LossHead.of(model)
            transform = measure_transform(model, head)
        return cls(model, head, transform)

    @property
    def num_classes(self) -> int:
        """The size of its vocabulary."""
        return self._head.head.out_features

    @torch.no_grad()
    def logits_for(self, model_inputs: Mapping[str, Any]) -> TeacherLogits:
        """Run it up to its head. Every rank calls it, and `release` when the logits are no longer needed."""
        seen: list[torch.Tensor] = []

        def answer(hidden: torch.Tensor, head: nn.Linear) -> torch.Tensor:
            del head
            seen.append(hidden)
            return hidden.new_zeros(1, 1, 1)

        self._head.ask(answer)
        self._model(**model_inputs)
        head = self._head.head
        # FSDP2 leaves the root's weights gathered after a forward pass, in the dtype of the computation.
        weight, bias = (None if one is None else _whole(one, seen[0].dtype) for one in (head.weight, head.bias))
        assert weight is not None
        return TeacherLogits(seen[0], weight, bias, self._transform)

    def release(self) -> None:
        """Free the weights that `logits_for` has left gathered."""
        reshard(self._model)


def _whole(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        return parameter.full_tensor().to(dtype)
    return parameter.detach()


@contextmanager
def told_as(target: Target, hint: str) -> Iterator[None]:
    """Tell what is wrong with a model as a fault of the component that it was built for."""
    try:
        yield
    except InputError as error:
        raise InputError([target.problem("", problem.message, hint) for problem in error.problems]) from error
