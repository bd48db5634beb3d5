"""Losses that take columns, and data sets of a user's own that bring them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from hp_core.data.protocols import Datasets, MeshContext
from tests.e2e.parts import NumberedRows

IGNORED = -100


class WeighedLabels(nn.Module):
    """The sum of weight times label, which can be computed by hand; the model only joins in with a zero."""

    reduction = "sum"
    columns = ("weights",)

    def forward(self, *, model_output: Any, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        supervised = labels != IGNORED
        return (weights * labels)[supervised].double().sum() + 0 * model_output.logits.sum()


class TwoColumns(nn.Module):
    """A dict with an entry for each of two columns."""

    reduction = "sum"

    def __init__(self, columns: list[str]) -> None:
        super().__init__()
        self.columns = columns

    def forward(self, *, model_output: Any, labels: torch.Tensor, **columns: torch.Tensor) -> dict[str, torch.Tensor]:
        zero = 0 * model_output.logits.sum()
        return {f"{name}_loss": value[labels != IGNORED].sum() + zero for name, value in columns.items()}


class WeightedCrossEntropy(nn.Module):
    """The sum of each token's cross entropy times its weight."""

    reduction = "sum"
    columns = ("weights",)

    def forward(self, *, model_output: Any, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        losses = nn.functional.cross_entropy(
            model_output.logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none"
        )
        return (losses * weights.flatten()).sum()


class Preparing(WeighedLabels):
    """Also looks at the weights before the model runs."""

    def prepare_model_inputs(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> dict[str, Any]:
        assert loss_inputs["weights"].shape == loss_inputs["labels"].shape
        return model_inputs


class WeightedRows(NumberedRows):
    """Numbered rows with weights of their own: row r weighs r + 1 everywhere."""

    def __init__(self, num_rows: int, kind: str, length: int = 16) -> None:
        super().__init__(num_rows, length, 96, set())
        self.kind = kind

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        weights: Any = np.full(self.max_seq_len, index + 1.0)
        if self.kind == "short":
            weights = weights[1:]
        elif self.kind == "text":
            weights = weights.astype(str)
        if self.kind != "none":
            row["weights"] = weights
        return row


def weighted_rows(
    kind: str = "whole", validation: str = "whole", rank_one: str | None = None, *, mesh_context: MeshContext
) -> Datasets:
    train = rank_one if rank_one is not None and mesh_context.rank == 1 else kind
    return Datasets(WeightedRows(8, train), WeightedRows(5, validation), WeightedRows(3, kind))


def forgetful_rows() -> Any:
    """A collator that keeps what every row has and drops the rest."""

    def collate(samples: Any) -> dict[str, torch.Tensor]:
        names = ("input_ids", "labels", "position_ids")
        return {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in names}

    return collate
