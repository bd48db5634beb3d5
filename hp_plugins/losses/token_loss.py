"""What the losses over tokens share: which tokens they learn from, and the losses of the model's routers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hp_plugins.losses.router import BALANCE, Z_LOSS, RouterLosses
from hp_plugins.losses.targets import Supervision


class TokenLoss(nn.Module):
    """A loss that is a sum over supervised tokens, with the router losses of a mixture of experts as step terms.

    A subclass computes `forward`; one that overrides `bind_model` or `prepare_model_inputs` calls those of this class.
    """

    reduction = "sum"
    terms_in_stages = True
    step_term_names = (BALANCE, Z_LOSS)

    def __init__(
        self, ignore_index: int, token_weights: str | None, router_balance: float | None, router_z_loss: float
    ) -> None:
        super().__init__()
        self._supervision = Supervision(ignore_index, token_weights)
        self._router = RouterLosses(router_balance, router_z_loss)
        self.columns = self._supervision.columns
        self.weight_column = token_weights
        self.ignore_index = ignore_index

    def bind_model(self, model: nn.Module, distributed_setup: Any) -> None:
        """Find the model's routers, if any of their losses has a weight. Every rank calls it.

        Raises:
            InputError: there are none, or their losses can't be computed exactly.
        """
        self._router.bind(model, distributed_setup)

    def prepare_model_inputs(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> dict[str, Any]:
        """Keep the labels from the model, which would compute a loss of its own with them."""
        del loss_inputs
        if self.training:  # an evaluation has no step, of which the routers' losses are terms
            self._router.arm()
        return {name: value for name, value in model_inputs.items() if name not in ("labels", "shift_labels")}

    @property
    def needs_statistics(self) -> bool:
        """Whether the balance of the routers is trained."""
        return self._router.needs_statistics

    def step_statistics(self, *, model_output: Any, real_tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """The load of the experts; see `RouterLosses`."""
        del model_output
        return self._router.statistics(real_tokens)

    def step_terms(
        self,
        *,
        model_output: Any,
        real_tokens: torch.Tensor,
        num_real_tokens: int,
        statistics: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """The router losses; see `RouterLosses`."""
        del model_output
        return self._router.terms(real_tokens, num_real_tokens, statistics)
