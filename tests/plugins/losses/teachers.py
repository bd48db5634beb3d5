"""Teachers to distil from, as recipes name them, and distillation written out token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from hp_core import Target
from hp_core.model.tiny import tiny_model
from hp_core.parallel.fsdp import shard_model
from hp_core.parallel.setup import DistributedSetup
from hp_core.training.loss import IGNORE_INDEX
from tests.plugins.losses.plain import Options, TinyLM


def tiny_teacher(
    family: str = "llama", seed: int = 1, dtype: str = "float32", *, distributed_setup: DistributedSetup
) -> nn.Module:
    """A model of transformers whose head is not near zero, sharded like any."""
    model = tiny_model(family, seed=seed, dtype={"float32": torch.float32, "float64": torch.float64}[dtype])
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8.0)
    shard_model(model, distributed_setup)
    return model


def plain_teacher(
    vocab: int = 97,
    features: int = 4,
    softcap: float | None = None,
    scale: float = 1.0,
    bias: bool = False,
    moved_by: float = 0.5,
    *,
    distributed_setup: Any,
) -> nn.Module:
    """A `TinyLM` in float64, `moved_by` from where a student starts, whose weights nobody froze."""
    del distributed_setup
    model = TinyLM(Options(softcap=softcap, scale=scale, bias=bias), vocab, features)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for one in model.parameters():
            one.add_(moved_by * torch.randn(one.shape, generator=generator, dtype=one.dtype))
    return model.train()


def teacher(function: str = "plain_teacher", **arguments: Any) -> Target:
    """The section of a recipe that names a teacher of this module."""
    path = f"tests.plugins.losses.teachers.{function}"
    return Target("loss_fn.teacher", "hp.models", import_path=path, arguments=arguments)


@dataclass(frozen=True)
class Distilling:
    """What distillation is told beside its teacher."""

    direction: str = "forward"
    temperature: float = 1.0
    kl_weight: float = 1.0
    ignore_index: int = IGNORE_INDEX
    token_weights: str | None = None


def token_by_token(
    student: torch.Tensor, of_teacher: torch.Tensor, loss_inputs: dict[str, torch.Tensor], options: Distilling
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sums of loss, divergence and cross entropy by their definitions, for logits of shape (rows, tokens, V)."""
    sums = torch.zeros(3, dtype=torch.float64)
    rows = zip(
        student.flatten(0, 1),
        of_teacher.flatten(0, 1),
        loss_inputs["labels"].flatten().tolist(),
        loss_inputs["weights"].flatten().tolist(),
        strict=True,
    )
    for z, t, target, weight in rows:
        if target in (IGNORE_INDEX, options.ignore_index):
            continue
        temperature, share = options.temperature, options.kl_weight
        q = (z / temperature).exp() / (z / temperature).exp().sum()
        p = (t / temperature).exp() / (t / temperature).exp().sum()
        divergence = (p * (p / q).log()).sum() if options.direction == "forward" else (q * (q / p).log()).sum()
        cross_entropy = -(z.exp()[target] / z.exp().sum()).log()
        loss = share * temperature**2 * divergence + (1 - share) * cross_entropy
        sums = sums + torch.stack((loss, divergence, cross_entropy)) * (weight if options.token_weights else 1)
    return sums[0], sums[1], sums[2]


def reluctant_teacher(*, distributed_setup: DistributedSetup) -> nn.Module:
    """A teacher that gives its gathered weights back after each forward pass."""
    model = tiny_model("llama", seed=1)
    fully_shard(model, mesh=distributed_setup.fsdp_mesh, reshard_after_forward=True)
    return model
