"""Losses for the recipe tests."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import nn

from hp_core.config.nested import ComponentOf
from hp_core.config.target import Target


class CausalLm(nn.Module):
    def __init__(self, ignore_index: int = -100, softcap: float | None = None) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.softcap = softcap

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        logits = model_output.logits.flatten(0, 1)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=self.ignore_index)


def make_loss(scale: float = 1.0) -> nn.Module:
    return CausalLm()


def unannotated_loss(scale=1.0):
    return CausalLm()


def not_a_loss(scale: float = 1.0) -> int:
    return 1


class NotALoss:
    def __init__(self, scale: float = 1.0) -> None:
        self.scale: Any = scale


class Around(nn.Module):
    def __init__(
        self,
        loss: Annotated[Target, ComponentOf("hp.losses")],
        scale: float = 1.0,
        teacher: Annotated[Target, ComponentOf("hp.models")] | None = None,
    ) -> None:
        super().__init__()
        self.loss = loss.build()
        self.scale = scale
        self.teacher = teacher
