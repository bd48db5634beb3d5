"""Whether a loss looks at everything that it is given: each target, and each column that it declares."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hp_core.testing.checks import require
from hp_core.testing.loss_steps import LossCase, loss_of, other_target
from hp_core.testing.setups import tiny_setup
from hp_core.training.loss import contract_of


def check_every_target_counts(case: LossCase) -> None:
    """Another target changes the loss, at each supervised position of a row, and so does another column."""
    with tiny_setup() as setup:
        model, batch = case.model(), case.batch()
        contract = contract_of(case.build())

        def value(one: Mapping[str, torch.Tensor]) -> float:
            torch.manual_seed(0)
            return float(loss_of(model, case.bound(model, setup), one).detach())

        loss = value(batch)
        labels = batch["labels"]
        for position in torch.nonzero(contract.is_target(labels[0])).flatten().tolist():
            changed = labels.clone()
            changed[0, position] = other_target(labels[0, position], contract)
            require(
                value({**batch, "labels": changed}) != loss,
                f"another target at position {position} of {labels.shape[1]} gives the same loss, {loss:.6g}; every "
                "label that isn't ignored counts, the first and the last as well",
            )
        for name in contract.columns:
            if not name.endswith("_labels"):
                require(
                    value({**batch, name: batch[name] * 2 + 1}) != loss,
                    f"another column {name!r} gives the same loss, {loss:.6g}; use it in forward, or don't declare it",
                )
