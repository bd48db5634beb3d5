"""The setup of a tiny run on the CPU, without a recipe: for trials, checks and tests that build a model directly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hp_core.config.models import (
    AcceleratorConfig,
    FsdpConfig,
    LaunchConfig,
    MixedPrecisionConfig,
    TrainerConfig,
    TrainingConfig,
)
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.setup import DistributedSetup, distributed


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
    sections: dict[str, Any] = {
        "training": TrainingConfig(train_iters=1, seed=seed, device="cpu"),
        "accelerator": accelerator or AcceleratorConfig(),
        "fsdp_config": fsdp or FsdpConfig(),
        "mixed_precision": precision or MixedPrecisionConfig(),
        "launch": LaunchConfig(timeout=timeout),
    }
    config = TrainerConfig.model_construct(**sections)
    with distributed(environment or ProcessEnvironment(), config) as setup:
        yield setup
