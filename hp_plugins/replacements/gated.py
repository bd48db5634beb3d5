"""`silu(gate) * up` that keeps its inputs for the backward pass and nothing else."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


class _SwiGLU(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        return _silu_backward(gradient * up, gate), gradient * F.silu(gate)


class _ScaledSwiGLU(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gate: torch.Tensor, up: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (F.silu(gate) * up * scale).to(gate.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gate, up, scale = ctx.saved_tensors
        active = F.silu(gate)
        scaled = (gradient * scale).to(gate.dtype)
        to_scale = (gradient * active * up).sum(-1, keepdim=True, dtype=_sum_dtype(scale)).to(scale.dtype)
        return _silu_backward(scaled * up, gate), scaled * active, to_scale


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` (Shazeer 2020), all of one shape; value and gradients have the bits of the plain expression.

    The plain expression keeps gate, silu(gate) and up; here silu(gate) is computed again in the backward pass.
    """
    return _SwiGLU.apply(gate, up)  # type: ignore[no-any-return, no-untyped-call]


def scaled_swiglu(gate: torch.Tensor, up: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up * scale` in the dtype of `gate`, for `scale` of shape (…, 1)."""
    return _ScaledSwiGLU.apply(gate, up, scale)  # type: ignore[no-any-return, no-untyped-call]


def is_silu(activation: Any) -> bool:
    """Whether an activation computes `x * sigmoid(x)`; it is tried on the CPU."""
    points = torch.linspace(-8, 8, 33, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        return torch.allclose(activation(points), F.silu(points), rtol=1e-5, atol=1e-6)


def _silu_backward(gradient: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled():
        # The operator has no derivative; this has, for gradients of gradients.
        sigmoid = torch.sigmoid(inputs)
        return gradient * sigmoid * (1 + inputs * (1 - sigmoid))
    return torch.ops.aten.silu_backward(gradient, inputs)  # type: ignore[no-any-return]


def _sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
