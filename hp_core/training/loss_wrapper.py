"""The base of a loss around another loss: everything that the engine asks of a loss is handed on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hp_core.errors import RunError
from hp_core.training.loss import BindsModel, HasStepTerms, HasTermsInStages, PreparesModelInputs, contract_of


class LossWrapper(nn.Module):
    """A loss that is another loss and more; a subclass writes `forward`.

    It declares what `loss_fn` declares, binds and prepares what `loss_fn` does, and has its step terms. A subclass
    that takes columns or has diagnostics of its own adds them to `self.columns` or `self.diagnostics`; its `forward`
    takes `**columns`. Losses of single tokens that it adds are reduced by `self.inner.reduced`, as the other's are.
    """

    def __init__(self, loss_fn: nn.Module) -> None:
        super().__init__()
        if not isinstance(loss_fn, nn.Module):
            raise TypeError(f"{type(self).__name__} needs a loss that is built; write super().__init__(loss.build())")
        self.loss_fn = loss_fn
        self.inner = contract = contract_of(loss_fn)
        self.reduction = contract.reduction
        self.columns = contract.columns
        self.weight_column = contract.weight_column
        self.ignore_index = contract.ignore_index
        self.diagnostics = contract.diagnostics

    def bind_model(self, model: nn.Module, distributed_setup: Any) -> None:
        """Show the other loss the model, if it wants to see it."""
        if isinstance(self.loss_fn, BindsModel):
            self.loss_fn.bind_model(model=model, distributed_setup=distributed_setup)

    def prepare_model_inputs(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> dict[str, Any]:
        """Let the other loss prepare the model's inputs, if it does."""
        if isinstance(self.loss_fn, PreparesModelInputs):
            return self.loss_fn.prepare_model_inputs(model_inputs=model_inputs, loss_inputs=loss_inputs)
        return model_inputs

    @property
    def needs_statistics(self) -> bool:
        """Whether the other loss has terms that depend on statistics of the step."""
        return isinstance(self.loss_fn, HasStepTerms) and self.loss_fn.needs_statistics

    @property
    def terms_in_stages(self) -> bool:
        """Whether the other loss has terms in all stages of a pipeline."""
        return isinstance(self.loss_fn, HasTermsInStages) and self.loss_fn.terms_in_stages

    def step_statistics(self, *, model_output: Any, real_tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """The other loss's statistics."""
        if not isinstance(self.loss_fn, HasStepTerms):
            return {}
        return self.loss_fn.step_statistics(model_output=model_output, real_tokens=real_tokens)

    def step_terms(
        self,
        *,
        model_output: Any,
        real_tokens: torch.Tensor,
        num_real_tokens: int,
        statistics: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """The other loss's terms."""
        if not isinstance(self.loss_fn, HasStepTerms):
            return {}
        return self.loss_fn.step_terms(
            model_output=model_output, real_tokens=real_tokens, num_real_tokens=num_real_tokens, statistics=statistics
        )

    def entries_of(
        self, model_output: Any, labels: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What the other loss returns, by entry; a bare tensor is called `task_loss`, since `loss` is their sum."""
        own = {name: columns[name] for name in self.inner.columns}
        loss = self.loss_fn(model_output=model_output, labels=labels, **own)
        return dict(loss) if isinstance(loss, Mapping) else {"task_loss": loss}

    def with_entry(
        self, entries: Mapping[str, torch.Tensor], name: str, value: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The entries and one more.

        Raises:
            RunError: there is one of that name.
        """
        if name in entries:
            raise RunError(f"loss_fn: {type(self.loss_fn).__name__} has an entry {name!r} already")
        return {**entries, name: value}
