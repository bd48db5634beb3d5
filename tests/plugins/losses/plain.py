"""The loss of a language model written out token by token, and a tiny model with every option of a head."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hp_core.training.loss import IGNORE_INDEX

TOKENS = (2, 6)


@dataclass(frozen=True)
class Options:
    """What a head, a model and a loss can add to plain cross entropy."""

    bias: bool = False
    tied: bool = False
    softcap: float | None = None
    scale: float = 1.0
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    ignore_index: int = IGNORE_INDEX
    token_weights: str | None = None

    def of_loss(self) -> dict[str, Any]:
        """The recipe arguments."""
        names = ("z_loss", "label_smoothing", "ignore_index", "token_weights")
        return {name: getattr(self, name) for name in names}


class TinyLM(nn.Module):
    """Embedding, one layer and a head, with the interface of transformers' models."""

    def __init__(self, options: Options, vocab: int, features: int = 5, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.options = options
        self.embedding = nn.Embedding(vocab, features, dtype=dtype)
        self.layer = nn.Linear(features, features, dtype=dtype)
        self.head = nn.Linear(features, vocab, bias=options.bias, dtype=dtype)
        nn.init.normal_(self.head.weight)
        if options.tied:
            self.head.weight = self.embedding.weight

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head

    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embedding(input_ids)).tanh()

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        logits = self.head(self.hidden(input_ids)) * self.options.scale
        if self.options.softcap is not None:
            logits = torch.tanh(logits / self.options.softcap) * self.options.softcap
        return SimpleNamespace(logits=logits)


def a_batch(vocab: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Model and loss inputs: the last class is a target, two tokens have none, and two more only if 3 marks them."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, vocab, TOKENS, generator=generator) for _ in range(2))
    labels[0, :4] = torch.tensor([vocab - 1, IGNORE_INDEX, 3, 0])
    labels[1, -2:] = torch.tensor([3, IGNORE_INDEX])
    weights = torch.rand(TOKENS, generator=generator) + 0.5
    weights[0, 1] = float("nan")
    model_inputs = {"input_ids": ids, "labels": labels, "shift_labels": labels, "use_cache": False}
    return model_inputs, {"labels": labels, "weights": weights}


def token_by_token(
    outputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, options: Options
) -> torch.Tensor:
    """The summed loss of a head's outputs, by the definitions alone."""
    total = torch.zeros((), dtype=outputs.dtype)
    for row, target, weight in zip(
        outputs.flatten(0, 1), labels.flatten().tolist(), weights.flatten().tolist(), strict=True
    ):
        if target in (IGNORE_INDEX, options.ignore_index):
            continue
        logits = row * options.scale
        if options.softcap is not None:
            logits = options.softcap * torch.tanh(logits / options.softcap)
        log_normaliser = logits.exp().sum().log()
        log_p = logits - log_normaliser
        smoothing = options.label_smoothing
        loss = (1 - smoothing) * -log_p[target] + smoothing / len(row) * -log_p.sum()
        loss = loss + options.z_loss * log_normaliser**2
        total = total + loss * (weight if options.token_weights else 1)
    return total


def run_loss(loss_fn: nn.Module, model: nn.Module, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> Any:
    """What an engine does with a micro-batch: prepare the inputs, call the model, call the loss."""
    outputs = model(**loss_fn.prepare_model_inputs(model_inputs, loss_inputs))
    columns = {name: loss_inputs[name] for name in loss_fn.columns}
    return loss_fn(model_output=outputs, labels=loss_inputs["labels"], **columns)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients by parameter, which are taken away."""
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float, what: Any) -> None:
    """Every gradient, by name, within `tolerance` of the largest one."""
    assert found.keys() == wanted.keys(), what
    largest = max(one.abs().max().item() for one in wanted.values())
    for name, one in wanted.items():
        assert (found[name] - one).abs().max().item() <= tolerance * largest, (what, name)
