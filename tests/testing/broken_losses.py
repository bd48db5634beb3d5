"""Losses that each break one promise, and some that keep them all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hp_core.training.loss import contract_of

IGNORED = -100


def nll(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each position, zero where there is no target."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")


class SumLoss(nn.Module):
    """Keeps every promise."""

    reduction = "sum"

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        return nll(model_output.logits, labels).sum()


class MeanLoss(nn.Module):
    """Keeps every promise; no number is declared, so it is taken for a mean."""

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        return nll(model_output.logits, labels).sum() / (labels != IGNORED).sum().clamp(min=1)


class ScaledModelOutputLoss(nn.Module):
    """Keeps every promise with the loss that the model computes."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        return model_output.loss * self.scale


class WeightedParts(nn.Module):
    """Keeps every promise: a dict, a column of the data, a model it looks at and inputs it adds to."""

    reduction = "sum"
    columns = ("weights",)

    def bind_model(self, model: nn.Module, distributed_setup: Any) -> None:
        self.num_ranks = distributed_setup.world_size

    def prepare_model_inputs(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = {name: value for name, value in model_inputs.items() if name not in ("labels", "shift_labels")}
        return {**inputs, "output_hidden_states": True}

    def forward(self, *, model_output: Any, labels: torch.Tensor, weights: torch.Tensor) -> Any:
        size = model_output.hidden_states[-1].float().square().mean(-1).flatten()[labels.flatten() != IGNORED]
        return {"main_loss": (nll(model_output.logits, labels) * weights.flatten()).sum(), "size_loss": size.sum()}


class ClassWeighted(nn.Module):
    """Keeps every promise with a buffer of a weight for each token id."""

    reduction = "sum"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.linspace(0.5, 1.5, 96))

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        logits = model_output.logits.flatten(0, 1).float()
        return F.cross_entropy(logits, labels.flatten(), self.weights, ignore_index=IGNORED, reduction="sum")


class Remembering(SumLoss):
    """Keeps its counter in a buffer, and counts training only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        if self.training:
            self.calls += 1
        return super().forward(model_output=model_output, labels=labels) * (1 + self.calls)


# contract


class ReturnsNumber(SumLoss):
    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        return float(super().forward(model_output=model_output, labels=labels).detach())


class ReturnsVector(SumLoss):
    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        return nll(model_output.logits, labels)


class Detached(SumLoss):
    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        return super().forward(model_output=model_output, labels=labels).detach()


class OtherNames(nn.Module):
    def forward(self, outputs: Any, targets: torch.Tensor) -> Any:
        return outputs.loss


class OddReduction(SumLoss):
    reduction = "batchmean"


class WithParameter(SumLoss):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        return super().forward(model_output=model_output, labels=labels) * self.weight


def no_module() -> Any:
    return lambda model_output, labels: model_output.loss


# model_hooks


class Freezes(SumLoss):
    def bind_model(self, model: nn.Module, distributed_setup: Any) -> None:
        model.get_input_embeddings().requires_grad_(False)


class Nudges(SumLoss):
    def bind_model(self, model: nn.Module, distributed_setup: Any) -> None:
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(1.001)


class AsksForNonsense(SumLoss):
    def prepare_model_inputs(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> Any:
        return {"input_ids": model_inputs["input_ids"], "attention_mask": "everywhere"}


class DropsPositions(SumLoss):
    def prepare_model_inputs(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> Any:
        return {"input_ids": model_inputs["input_ids"]}


class ReturnsNothing(SumLoss):
    def prepare_model_inputs(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> Any:
        model_inputs["use_cache"] = False


# token_weighting


class SumTakenForMean(nn.Module):
    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        return nll(model_output.logits, labels).sum()


class MeanDeclaredSum(MeanLoss):
    reduction = "sum"


class MeanOverPositions(nn.Module):
    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        return nll(model_output.logits, labels).mean()


class MeanOfRowMeans(nn.Module):
    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        rows = nll(model_output.logits, labels).view(labels.shape).sum(1) / (labels != IGNORED).sum(1).clamp(min=1)
        return rows.sum() / (labels != IGNORED).any(1).sum().clamp(min=1)


# ignored_tokens


class PenalisesEverywhere(SumLoss):
    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        penalty = model_output.logits.float().logsumexp(-1).square().sum()
        return super().forward(model_output=model_output, labels=labels) + 0.01 * penalty


class RaisesOnNothing(SumLoss):
    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        worst = nll(model_output.logits, labels)[labels.flatten() != IGNORED].max()
        return super().forward(model_output=model_output, labels=labels) + 0 * worst


# labels_shifted_once


class ShiftsAgain(SumLoss):
    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        return nll(model_output.logits[:, :-1], labels[:, 1:]).sum()


class ShiftsTheLogits(SumLoss):
    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        return nll(model_output.logits.roll(-1, 1), labels).sum()


# gradients


class HalfDetached(SumLoss):
    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        loss = super().forward(model_output=model_output, labels=labels)
        return 0.5 * loss + 0.5 * loss.detach()


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 1.001 * gradient


class WrongBackward(SumLoss):
    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        return Doubling.apply(super().forward(model_output=model_output, labels=labels))


# inputs_untouched


class ClampsInPlace(SumLoss):
    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        model_output.logits.clamp_(-1e9, 1e9)
        return super().forward(model_output=model_output, labels=labels)


class WritesLabels(SumLoss):
    def prepare_model_inputs(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in model_inputs.items() if name not in ("labels", "shift_labels")}

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        labels.clamp_(min=IGNORED)
        return super().forward(model_output=model_output, labels=labels)


class Pops(SumLoss):
    def prepare_model_inputs(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> dict[str, Any]:
        model_inputs.pop("labels")
        model_inputs.pop("shift_labels")
        return model_inputs


class WritesGradients(SumLoss):
    """Adds a zero to a gradient, as a loss that computes gradients in its forward pass might."""

    def bind_model(self, model: nn.Module, distributed_setup: Any) -> None:
        object.__setattr__(self, "head", model.get_output_embeddings())

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        if self.head.weight.grad is None:
            self.head.weight.grad = torch.zeros_like(self.head.weight)
        return super().forward(model_output=model_output, labels=labels)


# state


class RemembersInAttribute(SumLoss):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        self.calls += self.training
        return super().forward(model_output=model_output, labels=labels) * (1 + self.calls)


class Unstorable(SumLoss):
    def get_extra_state(self) -> Any:
        return object()

    def set_extra_state(self, state: Any) -> None:
        pass


# every_target_counts


class DropsTheLast(SumLoss):
    """Shifts neither, but leaves the last position out on both sides."""

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        labels = torch.cat([labels[:, :-1], torch.full_like(labels[:, -1:], IGNORED)], dim=1)
        return super().forward(model_output=model_output, labels=labels)


class IgnoresItsColumn(SumLoss):
    columns = ("weights",)

    def forward(self, *, model_output: Any, labels: torch.Tensor, weights: torch.Tensor) -> Any:
        return super().forward(model_output=model_output, labels=labels)


# evaluation


class CountsEvaluations(SumLoss):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        self.calls += 1
        return super().forward(model_output=model_output, labels=labels)


class NeedsGradients(SumLoss):
    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        loss = super().forward(model_output=model_output, labels=labels)
        torch.autograd.grad(loss, model_output.logits, retain_graph=True)
        return loss


# two_ranks, silent_rank


class TimesRanks(SumLoss):
    """What a loss needs where gradients are averaged over the ranks; here they are sums."""

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        return super().forward(model_output=model_output, labels=labels) * dist.get_world_size()


class OtherParametersOnRanks(SumLoss):
    """Reads a weight that FSDP2 shards, without gathering it."""

    def bind_model(self, model: nn.Module, distributed_setup: Any) -> None:
        self.scale = sum(
            float(p.detach().to_local().norm() if dist.get_world_size() > 1 else p.detach().norm())
            for p in model.parameters()
        )

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        return super().forward(model_output=model_output, labels=labels) * self.scale


class NeedsTargetsOnEveryRank(SumLoss):
    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        if dist.get_world_size() > 1 and not (labels != IGNORED).any():
            raise RuntimeError("nothing to learn here")
        return super().forward(model_output=model_output, labels=labels)


class DeclaresEverything(nn.Module):
    """Keeps every promise: weighted tokens, an ignored label of its own, and a diagnostic."""

    columns = ("weights",)
    weight_column = "weights"
    ignore_index = 7
    diagnostics = ("hits",)

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, *, model_output: Any, labels: torch.Tensor, weights: torch.Tensor) -> Any:
        contract = contract_of(self)
        losses = nll(model_output.logits, labels).view(labels.shape)
        hits = (model_output.logits.argmax(-1) == labels).float()
        return {name: contract.reduced(one, labels, {"weights": weights}) for name, one in self._parts(losses, hits)}

    def _parts(self, losses: torch.Tensor, hits: torch.Tensor) -> Any:
        return (("task_loss", losses), ("hits", hits))


class DividesByCount(DeclaresEverything):
    """A mean over weighted tokens that divides by their number."""

    def forward(self, *, model_output: Any, labels: torch.Tensor, weights: torch.Tensor) -> Any:
        is_target = (labels != IGNORED) & (labels != self.ignore_index)
        losses = nll(model_output.logits, labels).view(labels.shape) * weights * is_target
        return {"task_loss": losses.sum() / is_target.sum().clamp(min=1)}


class CountsTheIgnored(DeclaresEverything):
    """Learns from labels that it says it ignores."""

    def forward(self, *, model_output: Any, labels: torch.Tensor, weights: torch.Tensor) -> Any:
        weights = weights * (labels != IGNORED)
        losses = nll(model_output.logits, labels).view(labels.shape) * weights
        return {"task_loss": losses.sum() / weights.sum().clamp(min=1e-9)}


class LogsInSecret(DeclaresEverything):
    """Returns something to log among what is to be trained."""

    diagnostics = ()
