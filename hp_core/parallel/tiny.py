"""Setups without a recipe, for trials, checks and tests: of a tiny run on the CPU, or of one rank of a large one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hp_core.config.launch import LaunchConfig
from hp_core.config.models import (
    AcceleratorConfig,
    FsdpConfig,
    MixedPrecisionConfig,
    TrainerConfig,
    TrainingConfig,
)
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.setup import DistributedSetup, distributed, setup_of


@contextmanager
def tiny_setup(
    environment: ProcessEnvironment | None = None,
    *,
    accelerator: AcceleratorConfig | None = None,
    fsdp: FsdpConfig | None = None,
    precision: MixedPrecisionConfig | None = None,
    seed: int = 7,
    timeout: float = 60.0,
) -> Iterator[DistributedSetup]:
    """The setup of a CPU run whose recipe says only this; `environment` is what `run_ranks` hands each rank."""
    config = _config(accelerator, fsdp, precision, seed=seed, timeout=timeout, rows=8)
    with distributed(environment or ProcessEnvironment(), config) as setup:
        yield setup


@contextmanager
def fake_setup(
    world_size: int,
    rank: int = 0,
    *,
    accelerator: AcceleratorConfig | None = None,
    fsdp: FsdpConfig | None = None,
    precision: MixedPrecisionConfig | None = None,
) -> Iterator[DistributedSetup]:
    """The setup of one rank among as many as one likes, in this process alone: its collectives do nothing.

    So a model can be planned and sharded on the meta device as in a run of a thousand ranks, and not trained.
    """
    config = _config(accelerator, fsdp, precision, seed=7, timeout=60.0, rows=world_size)
    environment = ProcessEnvironment(launcher="torchrun", rank=rank, world_size=world_size)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        assert dist.group.WORLD is not None
        yield setup_of(environment, config, device=torch.device("cpu"), backend="fake", host_group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def _config(
    accelerator: AcceleratorConfig | None,
    fsdp: FsdpConfig | None,
    precision: MixedPrecisionConfig | None,
    *,
    seed: int,
    timeout: float,
    rows: int,
) -> TrainerConfig:
    sections: dict[str, Any] = {
        "training": TrainingConfig(train_iters=1, seed=seed, device="cpu", global_batch_size=rows),
        "accelerator": accelerator or AcceleratorConfig(),
        "fsdp_config": fsdp or FsdpConfig(),
        "mixed_precision": precision or MixedPrecisionConfig(),
        "launch": LaunchConfig(timeout=timeout),
    }
    return TrainerConfig.model_construct(**sections)
