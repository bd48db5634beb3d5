"""The loss of a linear head, some tokens at a time, with the gradients taken on the way forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hp_core.training.loss import IGNORE_INDEX
from hp_plugins.losses.logits import LogitTransform
from hp_plugins.losses.targets import Targets


class ChunkObjective(Protocol):
    """What some tokens cost."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the sums: none for one, or their number."""
        ...

    @property
    def total_and_gradient_(self) -> Callable[..., torch.Tensor]:
        """Gives the sums over some tokens, and leaves the derivative of the first one in `logits`.

        It is called with `logits`, (tokens, classes) in fp32 or float64, to be overwritten; `targets`, (tokens,), none
        of them -100; `weights`, (tokens,) in the dtype of the logits or None for one each; and whatever else the loss
        was given of each token.
        """
        ...


@dataclass(frozen=True)
class ChunkedHeadLoss:
    """`sum(objective(transform(hidden @ weight.T + bias)))` without ever holding the logits of all tokens.

    The logits of `chunk_size` tokens at a time go into one buffer, which then holds their derivative. With a soft
    cap, a second buffer holds its slope. `name` is how a recipe calls the loss.
    """

    objective: ChunkObjective
    transform: LogitTransform
    chunk_size: int
    name: str = "chunked_causal_lm"

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: Targets,
        *others: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and what its gradient flows through.

        Args:
            hidden: (tokens, features).
            weight: (classes, features).
            bias: (classes,), or None.
            targets: of the tokens.
            others: what else the objective needs of each token, (tokens, ...).

        Returns:
            A zero of shape (1, 1, 1) whose gradient reaches `hidden`, `weight` and `bias`, also where there are no
            targets; and the objective's sums over the targets, without a gradient. Both are in fp32, or float64 for
            inputs of float64. The loss to train on is the first of the sums plus the zero.
        """
        found = _Backward.apply(hidden, weight, bias, targets, others, self, torch.is_grad_enabled())
        return found[0], found[1]


@dataclass(frozen=True)
class _Gradients:
    """Sums of the gradients, in fp32 or float64; None where nobody asked."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    def scaled(self, factor: torch.Tensor, hidden: torch.dtype, weight: torch.dtype) -> tuple[torch.Tensor | None, ...]:
        """All of them times a scalar, in the dtypes of the inputs; the sums are overwritten."""
        found = ((self.hidden, hidden), (self.weight, weight), (self.bias, weight))
        return tuple(None if one is None else one.mul_(factor.to(one.dtype)).to(dtype) for one, dtype in found)


class _Backward(torch.autograd.Function):
    """Takes the gradients in the forward pass, where the logits are at hand, and scales them in the backward pass."""

    @staticmethod
    def forward(  # type: ignore[override]  # torch declares *args
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: Targets,
        others: tuple[torch.Tensor, ...],
        loss: ChunkedHeadLoss,
        with_gradients: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Without grad mode autograd still says which inputs have a gradient in principle.
        needed = [with_gradients and one for one in ctx.needs_input_grad[:3]]
        total, ctx.gradients = _sums(loss, hidden, weight, bias, targets, others, needed)
        ctx.dtypes, ctx.name = (hidden.dtype, weight.dtype), loss.name
        ctx.mark_non_differentiable(total)
        return total.new_zeros(1, 1, 1), total

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{ctx.name} has no second derivative: it keeps gradients, not logits; use loss_fn: causal_lm"
            )
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                f"{ctx.name} gives its gradients once and frees them; a second backward pass through the same "
                "forward pass needs loss_fn: causal_lm"
            )
        return (*gradients.scaled(outer[0].reshape(()), *ctx.dtypes), None, None, None, None)


def _sums(
    loss: ChunkedHeadLoss,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: Targets,
    others: tuple[torch.Tensor, ...],
    needed: list[bool],
) -> tuple[torch.Tensor, _Gradients]:
    """The objective's sums and the gradients that are `needed` of hidden states, weight and bias."""
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    labels, weights, rows, learnt = targets.labels, targets.weights, hidden, None
    if (labels == IGNORE_INDEX).any():
        learnt = (labels != IGNORE_INDEX).nonzero().flatten()
        rows, labels = rows.index_select(0, learnt), labels.index_select(0, learnt)
        weights = None if weights is None else weights.index_select(0, learnt)
        others = tuple(one.index_select(0, learnt) for one in others)
    weights = None if weights is None else weights.to(dtype)
    factors = (rows, weight)
    if weight.device.type == "cpu":
        # Products of a CPU end in the dtype of their factors. Logits are exact; their derivative is rounded anyway.
        rows, weight = rows.to(dtype), weight.to(dtype)
        if factors[0].dtype != factors[1].dtype:
            factors = (rows, weight)
    gradients = _Gradients(
        torch.empty(rows.shape, dtype=dtype, device=rows.device) if needed[0] else None,
        torch.zeros(weight.shape, dtype=dtype, device=rows.device) if needed[1] else None,
        torch.zeros(len(weight), dtype=dtype, device=rows.device) if needed[2] else None,
    )
    # In fp32 or float64, `out_dtype` is for factors of fewer bits.
    wide: dict[str, Any] = {} if weight.dtype == dtype else {"out_dtype": dtype}
    buffer = torch.empty(min(loss.chunk_size, len(rows)), len(weight), dtype=dtype, device=rows.device)
    slopes = None if loss.transform.softcap is None else torch.empty_like(buffer)
    total = torch.zeros(loss.objective.shape, dtype=dtype, device=rows.device)
    for start in range(0, len(rows), loss.chunk_size):
        chunk = slice(start, start + loss.chunk_size)
        some = rows[chunk]
        logits = torch.mm(some, weight.t(), out=buffer[: len(some)], **wide)
        slope = None if slopes is None else slopes[: len(some)]
        if bias is not None:
            logits += bias
        loss.transform.apply_(logits, slope)
        total += loss.objective.total_and_gradient_(
            logits, labels[chunk], None if weights is None else weights[chunk], *(one[chunk] for one in others)
        )
        if any(needed):
            loss.transform.pull_back_(logits, slope)
            _add(gradients, chunk, logits, *factors)
    if learnt is not None and gradients.hidden is not None:
        spread = torch.zeros(hidden.shape, dtype=dtype, device=rows.device).index_copy_(0, learnt, gradients.hidden)
        gradients = _Gradients(spread, gradients.weight, gradients.bias)
    return total, gradients


def _add(
    gradients: _Gradients, chunk: slice, derivative: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor
) -> None:
    """Add what a chunk gives, where `derivative` is by the outputs of the head; products are of the factors' dtype."""
    if gradients.bias is not None:
        gradients.bias.add_(derivative.sum(0))
    factor, some = derivative.to(weight.dtype), rows[chunk]
    # In fp32 or float64, `out_dtype` is for factors of fewer bits, and a CPU has none.
    narrow = weight.dtype != derivative.dtype
    wide: dict[str, Any] = {"out_dtype": derivative.dtype} if narrow and weight.device.type != "cpu" else {}
    if narrow and not wide:
        if gradients.hidden is not None:
            gradients.hidden[chunk] = torch.mm(factor, weight)
        if gradients.weight is not None:
            gradients.weight.add_(torch.mm(factor.t(), some))
        return
    if gradients.hidden is not None:
        torch.mm(factor, weight, out=gradients.hidden[chunk], **wide)
    if gradients.weight is not None:
        torch.addmm(gradients.weight, factor.t(), some, out=gradients.weight, **wide)
