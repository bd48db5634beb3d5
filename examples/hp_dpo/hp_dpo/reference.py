"""The model that the policy is compared with, and the log-probabilities of answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn

from hp_core import ArgumentError, InputError, Run, Target
from hp_core.model.replacement.replacer import ModuleReplacer
from hp_core.model.vocabulary import vocabulary_of
from hp_core.training.beside import UNTRAINED, frozen_model
from hp_core.training.evaluation import evaluating
from hp_dpo.data import CHOSEN, REJECTED
from hp_plugins.models.causal_lm import causal_lm
from hp_plugins.trainers.probes import check_isolation

IGNORED = -100


@runtime_checkable
class HasAdapter(Protocol):
    """A model with an adapter that can be switched off for a while, as those of `peft` are."""

    def disable_adapter(self) -> AbstractContextManager[Any]:
        """The model without its adapter, inside the block."""
        ...


def answer_log_probs(logits: torch.Tensor, loss_inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The log-probability of both answers of each pair, `[pairs, 2]`, in fp32 or float64; 0 where there is none."""
    labels, answers = loss_inputs["labels"], loss_inputs["answers"]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    of_tokens = -losses.view(labels.shape)
    return torch.stack([(of_tokens * (answers == one)).sum(-1) for one in (CHOSEN, REJECTED)], dim=-1)


class Reference:
    """A frozen model, or the policy without its adapter: in evaluation mode, without gradients, sharded alike."""

    def __init__(self, model: nn.Module, adapter: HasAdapter | None = None) -> None:
        self._model, self._adapter = model, adapter

    @classmethod
    def of(cls, run: Run, policy: nn.Module, path: str | None, trainer: Target, drawn: dict[str, Any]) -> Reference:
        """The model at `path`, else the policy without its adapter, else the policy before training.

        `drawn` is the state of the random streams that the policy was built from. Every rank calls it.

        Raises:
            InputError: it can't be built, or it is no fixed model with the policy's tokens.
        """
        if path is None and isinstance(policy, HasAdapter):
            reference = cls(policy, policy)
            if reference._moves(run.setup.device):
                message = "is null, and what is trained is more than the adapter, so the policy without it would change"
                raise InputError(trainer.problem("reference", message, "name a model, or train the adapter alone"))
            return reference
        if path is None:
            config, hook = run.config, run.plugins.hook
            build = partial(hook.build_model, config=config, **UNTRAINED)
            replacer = ModuleReplacer(config.plan_overrides, hook.replace_module)
            built = frozen_model(lambda own: build(distributed_setup=own), run.setup, "trainer", replacer, drawn)
        else:
            try:
                build = partial(causal_lm, pretrained=path)
                built = frozen_model(lambda own: build(distributed_setup=own), run.setup, "trainer.reference")
            except ArgumentError as error:
                raise InputError(trainer.problem("reference", error.message, error.hint)) from error
        found, wanted = vocabulary_of(built), vocabulary_of(policy)
        if found != wanted and None not in (found, wanted):
            message = f"{path!r} has a vocabulary of {found}, the policy one of {wanted}"
            raise InputError(trainer.problem("reference", message, "a model with the policy's tokenizer is needed"))
        return cls(built)

    def require_isolation(self, device: torch.device, trainer: Target) -> None:
        """Refuse a model that lets one answer of a pair see the other. Every rank calls it.

        Raises:
            InputError: it does.
        """
        try:
            check_isolation(self._model, device)
        except InputError as error:
            raise InputError(trainer.problem("reference", error.problems[0].message)) from error

    def log_probs(self, model_inputs: Mapping[str, Any], loss_inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The log-probabilities of both answers of each pair, `[pairs, 2]`. Every rank calls it."""
        with self._at_rest():
            return answer_log_probs(self._model(**model_inputs).logits, loss_inputs)

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """In evaluation mode, without gradients and without the adapter, inside the block."""
        # FSDP2 hands an adapter's flags, which are off in the block, on to parameters that it gathers meanwhile.
        flags = [(one, one.requires_grad) for one in self._model.parameters()]
        try:
            with evaluating(self._model), nullcontext() if self._adapter is None else self._adapter.disable_adapter():
                yield
        finally:
            for parameter, flag in flags:
                parameter.requires_grad_(flag)

    def _moves(self, device: torch.device) -> bool:
        """Whether anything that is trained has a part in what it computes."""
        with self._at_rest(), torch.enable_grad():
            logits = self._model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=device), use_cache=False).logits
            return bool(logits.requires_grad)
