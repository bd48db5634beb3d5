"""The update rule of Muon on parameters that ranks share: each update is that of the whole matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Optimizer

RateRule = Literal["original", "match_rms_adamw"]
# Of the quintic polynomial that is steepest at zero and keeps singular values near one (Jordan et al. 2024).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


class WholeMatrixMuon(Optimizer):
    """Muon (Jordan et al. 2024) of matrices, (rows, columns), and of stacks of them, (matrices, rows, columns).

    Each matrix of a stack is made orthogonal by itself. The momentum lies with the parameter's own shards; its matrices
    are gathered whole for the iteration, which runs in bf16 and would round otherwise with every sum that is cut. So a
    sharded step is the unsharded one to the last bit. Matrices of a stack that a rank holds whole are not gathered.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
        ns_steps: int,
        adjust_lr_fn: RateRule,
        weight_decay: float,
    ) -> None:
        settings = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **settings})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Every rank calls it."""
        if closure is not None:
            raise ValueError("this optimizer takes no closure")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, momentum = self.state[parameter], group["momentum"]
        buffer = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            gradient = gradient.redistribute(placements=parameter.placements)
        # Products and sums apart: a fused one rounds otherwise where a shard ends within a vector of the CPU.
        new = gradient * (1 - momentum)
        buffer.mul_(momentum).add_(new)
        direction = new.add_(buffer * momentum) if group["nesterov"] else buffer
        update = _on_whole_matrices(direction, parameter, group["ns_steps"])
        rate = group["lr"] * rate_factor(*parameter.shape[-2:], group["adjust_lr_fn"])
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        own.mul_(1 - group["lr"] * group["weight_decay"])
        own.add_(update.to(own.dtype).mul_(-rate))


def rate_factor(rows: int, columns: int, rule: RateRule) -> float:
    """What the learning rate of a matrix is multiplied by, as `torch.optim.Muon` does it."""
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def orthogonal(matrix: torch.Tensor, num_iterations: int) -> torch.Tensor:
    """Roughly the nearest orthogonal matrix, (rows, columns), in bf16: the singular values come near one.

    Newton-Schulz iteration of Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    result = (matrix.T if is_tall else matrix).bfloat16()
    result = result / result.norm().clamp(min=_EPS)
    for _ in range(num_iterations):
        gram = result @ result.T
        result = torch.addmm(result, torch.addmm(gram, gram, gram, beta=b, alpha=c), result, beta=a)
    return result.T if is_tall else result


def _on_whole_matrices(direction: torch.Tensor, parameter: torch.Tensor, num_iterations: int) -> torch.Tensor:
    """This rank's own part of the matrices, each made orthogonal."""
    if not isinstance(direction, DTensor):
        return _each_orthogonal(direction, num_iterations)
    placements, is_stack = direction.placements, direction.ndim > 2
    stays = [is_stack and _dim(placement) == 0 for placement in placements]
    gathered = [one if stay else Replicate() for one, stay in zip(placements, stays, strict=True)]
    matrices = _each_orthogonal(direction.redistribute(placements=gathered).to_local(), num_iterations)
    cut = [Replicate() if stay else one for one, stay in zip(placements, stays, strict=True)]
    return distribute_tensor(matrices, direction.device_mesh, cut, src_data_rank=None).to_local()


def _each_orthogonal(matrices: torch.Tensor, num_iterations: int) -> torch.Tensor:
    # One by one: a batched product may round otherwise for another number of matrices.
    if matrices.ndim == 2:
        return orthogonal(matrices, num_iterations)
    if len(matrices) == 0:
        return matrices
    return torch.stack([orthogonal(matrix, num_iterations) for matrix in matrices])


def _dim(placement: Placement) -> int | None:
    return placement.dim if isinstance(placement, (Shard, _StridedShard)) else None
