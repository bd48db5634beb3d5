"""A model's head that, when it is asked to, answers something else than its logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from hp_core.errors import InputError, Problem, RunError
from hp_core.parallel.tensor.vocabulary import VocabularyHead, VocabularyShard
from hp_core.training.evaluation import evaluating
from hp_plugins.losses.logits import LogitTransform, probe_outputs

_DENSE = "loss_fn: causal_lm works with any model that returns logits"
_NUM_PROBE_TOKENS = 4

# What a head answers in place of its logits, for its input of shape (batch, sequence, features).
Answer = Callable[[torch.Tensor, nn.Linear], torch.Tensor]


@runtime_checkable
class HasOutputEmbeddings(Protocol):
    """A model that says which of its modules makes the logits, as those of transformers do."""

    def get_output_embeddings(self) -> nn.Module | None:
        """The head."""
        ...


@dataclass
class _Question:
    answer: Answer
    on_shards: bool
    is_answered: bool = False


class LossHead:
    """Stands in for the `forward` of one head. It answers one question in the model's next call, and is plain else.

    What it computes, it computes within the head's own call, so that FSDP2 gathers and frees the weight as ever.
    """

    def __init__(self, head: nn.Linear, shared: VocabularyHead | None = None) -> None:
        self.head = head
        self._shared = shared
        self._question: _Question | None = None

    @property
    def shard(self) -> VocabularyShard | None:
        """This rank's part of the vocabulary, where tensor ranks share it."""
        return None if self._shared is None else self._shared.shard

    @classmethod
    def of(cls, model: nn.Module) -> LossHead:
        """The one of this model's head; several losses on a model share it.

        Raises:
            InputError: the model has no head, or one that is more than `hidden @ weight.T + bias`.
        """
        head = model.get_output_embeddings() if isinstance(model, HasOutputEmbeddings) else None
        if head is None:
            raise _refused(f"{_name(model)} has no output embeddings to take the loss in")
        if isinstance(head.forward, cls):
            return head.forward
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
            raise _refused(f"the head of {_name(model)} is a {_name(head)}, not a plain torch.nn.Linear")
        shared = head.forward if isinstance(head.forward, VocabularyHead) else None
        if shared is None and "forward" in vars(head):
            raise _refused(f"the forward of the head of {_name(model)} is replaced by {head.forward!r}")
        if "weight" not in dict(head.named_parameters(recurse=False)):
            raise _refused(f"the weight of the head of {_name(model)} is computed from other parameters")
        found = cls(head, shared)
        head.forward = found
        model.register_forward_hook(found._forget, always_call=True)
        return found

    def ask(self, answer: Answer, *, on_shards: bool = False) -> None:
        """Have the next call of the model end in this answer instead of logits.

        Args:
            answer: is given the head, with its whole weights.
            on_shards: give it the head with this rank's part of the weights instead, where tensor ranks share them.
        """
        self._question = _Question(answer, on_shards)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """The logits, or the answer to what was asked.

        Raises:
            RunError: the head is called again while the model answers a question.
        """
        question = self._question
        if question is None:
            return nn.Linear.forward(self.head, input) if self._shared is None else self._shared(input)
        if question.is_answered:
            raise RunError(f"loss_fn: the model calls its head more than once in a forward pass; {_DENSE}")
        question.is_answered = True
        if self._shared is None:
            return question.answer(input, self.head)
        return self._shared.answered(input, question.answer, on_shards=question.on_shards)

    def _forget(self, *args: Any) -> None:
        # Also after a failed call: what comes next may be the sampling of text.
        self._question = None


def call_briefly(model: nn.Module) -> Any:
    """What the model gives for a few tokens. Every rank calls it."""
    device = next(model.parameters()).device
    with evaluating(model):
        return model(input_ids=torch.arange(_NUM_PROBE_TOKENS, device=device)[None], use_cache=False)


def measure_transform(model: nn.Module, head: LossHead) -> LogitTransform:
    """What the model does to the outputs of its head, seen in one call. Every rank calls it.

    Raises:
        InputError: it is no scale and soft cap, or the model doesn't return them as its logits.
    """
    given: list[torch.Tensor] = []

    def answer(hidden: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        given.append(probe_outputs(*hidden.shape[:-1], linear.out_features, device=hidden.device))
        return given[0]

    head.ask(answer)
    output = call_briefly(model)
    if not given:
        raise _refused(f"{_name(model)} does not call its output embeddings")
    transform = None
    if given[0].shape[:-1] == (1, _NUM_PROBE_TOKENS):
        transform = LogitTransform.measured(given[0], output.logits)
    if transform is None:
        raise _refused(f"what {_name(model)} does to the output of its head is no scale and no soft cap")
    return transform


def _refused(message: str) -> InputError:
    return InputError(Problem(message, path="loss_fn", hint=_DENSE))


def _name(module: nn.Module) -> str:
    # FSDP2 gives what it shards a class of its own, made of the original one.
    return type(module).__name__.removeprefix("FSDP")
