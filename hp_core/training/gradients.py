"""The norm of all gradients, each parameter counted once over every mesh, and clipping to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from hp_core.parallel.setup import DistributedSetup

# Elements whose squares are added up in fp32 before float64 takes over.
_PIECE = 4096


def norm_and_count(
    parameters: Sequence[nn.Parameter], count: torch.Tensor, setup: DistributedSetup
) -> tuple[float, int]:
    """The 2-norm over all gradients of all ranks, and the sum of `count` over the ranks, in one collective.

    Args:
        parameters: this rank's parameters; those without a gradient count as zero.
        count: a scalar to be summed alongside (how many micro-batch losses of this rank are not finite).

    A parameter that several ranks hold whole is counted once: each rank adds its local sum of squares divided by
    the number of copies. The sum runs in float64, so it does not depend on how many ranks share the work.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    squares = torch.zeros((), dtype=torch.float64, device=setup.device)
    if gradients:
        copies = torch.tensor([_copies(gradient, setup) for gradient in gradients], dtype=torch.float64)
        squares = (_squares([local_part(one) for one in gradients]) / copies.to(setup.device)).sum()
    both = torch.stack([squares, count.to(squares)])
    if setup.world_size > 1:
        dist.all_reduce(both)
    total, counted = both.tolist()
    return float(total) ** 0.5, int(counted)


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply every gradient by `factor`, in place."""
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def clip(parameters: Sequence[nn.Parameter], norm: float, max_norm: float | None) -> None:
    """Scale gradients of norm `norm` down to `max_norm` exactly; leave smaller ones alone."""
    if max_norm is not None and norm > max_norm:
        scale_gradients(parameters, max_norm / norm)


def local_part(gradient: torch.Tensor) -> torch.Tensor:
    """This rank's own elements of a gradient."""
    if not isinstance(gradient, DTensor):
        return gradient
    if any(isinstance(placement, Partial) for placement in gradient.placements):
        raise ValueError("a gradient is still a partial sum; it must be reduced before its norm is taken")
    return gradient.to_local()


def _squares(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of squares of each tensor, (tensors,) in float64."""
    if parts[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(parts, 2, dtype=torch.float32)).double().square()
    return torch.stack([_norms_of_pieces(part).double().square().sum() for part in parts])


def _norms_of_pieces(part: torch.Tensor) -> torch.Tensor:
    # The CPU adds up squares in a few fp32 lanes: of 33 million elements the norm is off by 2e-3, and by another amount
    # for every number of ranks that share them.
    flat = part.reshape(-1)
    end = flat.numel() // _PIECE * _PIECE
    pieces = torch.linalg.vector_norm(flat[:end].view(-1, _PIECE), dim=1, dtype=torch.float32)
    return torch.cat([pieces, torch.linalg.vector_norm(flat[end:], dtype=torch.float32)[None]])


def _copies(gradient: torch.Tensor, setup: DistributedSetup) -> int:
    """How many ranks hold the same elements. A mesh spans some of a stage's ranks; along the others all is the same."""
    parts = 1
    if isinstance(gradient, DTensor):
        for axis, placement in enumerate(gradient.placements):
            if not isinstance(placement, Replicate):
                parts *= gradient.device_mesh.size(axis)
    return setup.world_size // setup.sizes.pp // parts
