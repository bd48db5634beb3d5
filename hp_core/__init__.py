"""HyperParallel: train transformers models from one YAML recipe, on one CPU or a thousand GPUs.

This module is the public API. Importing it is cheap: what it takes from elsewhere is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hp_core.errors import ArgumentError, HpError, InputError, Origin, Problem, RunError

if TYPE_CHECKING:
    from hp_core.config import ComponentOf, Recipe, Target, TrainerConfig, load_recipe
    from hp_core.data.protocols import Datasets, MeshContext, RowDataset, Tokenizer
    from hp_core.hookspecs import hookimpl
    from hp_core.model.build import finish_model
    from hp_core.model.config import model_config
    from hp_core.model.replacement.contract import Convert, Rename, ReplacementContext, module_replacement
    from hp_core.model.replacement.replacer import replace_modules
    from hp_core.observe.trackers import Tracker
    from hp_core.parallel.fsdp import shard_model
    from hp_core.parallel.injection import inner_wrapper, local_compute
    from hp_core.parallel.plan.model_plan import ModelPlan, plan_model
    from hp_core.parallel.setup import DistributedSetup
    from hp_core.training.base import BaseTrainer
    from hp_core.training.loss import ModelOutputLoss
    from hp_core.training.loss_wrapper import LossWrapper
    from hp_core.training.run import Run

_LAZY = {
    "BaseTrainer": "hp_core.training.base",
    "ComponentOf": "hp_core.config",
    "Convert": "hp_core.model.replacement.contract",
    "Datasets": "hp_core.data.protocols",
    "DistributedSetup": "hp_core.parallel.setup",
    "LossWrapper": "hp_core.training.loss_wrapper",
    "MeshContext": "hp_core.data.protocols",
    "ModelOutputLoss": "hp_core.training.loss",
    "ModelPlan": "hp_core.parallel.plan.model_plan",
    "Recipe": "hp_core.config",
    "Rename": "hp_core.model.replacement.contract",
    "ReplacementContext": "hp_core.model.replacement.contract",
    "RowDataset": "hp_core.data.protocols",
    "Run": "hp_core.training.run",
    "Target": "hp_core.config",
    "Tokenizer": "hp_core.data.protocols",
    "Tracker": "hp_core.observe.trackers",
    "TrainerConfig": "hp_core.config",
    "finish_model": "hp_core.model.build",
    "hookimpl": "hp_core.hookspecs",
    "inner_wrapper": "hp_core.parallel.injection",
    "load_recipe": "hp_core.config",
    "local_compute": "hp_core.parallel.injection",
    "model_config": "hp_core.model.config",
    "module_replacement": "hp_core.model.replacement.contract",
    "plan_model": "hp_core.parallel.plan.model_plan",
    "replace_modules": "hp_core.model.replacement.replacer",
    "shard_model": "hp_core.parallel.fsdp",
}

__all__ = [
    "ArgumentError",
    "BaseTrainer",
    "ComponentOf",
    "Convert",
    "Datasets",
    "DistributedSetup",
    "HpError",
    "InputError",
    "LossWrapper",
    "MeshContext",
    "ModelOutputLoss",
    "ModelPlan",
    "Origin",
    "Problem",
    "Recipe",
    "Rename",
    "ReplacementContext",
    "RowDataset",
    "Run",
    "RunError",
    "Target",
    "Tokenizer",
    "Tracker",
    "TrainerConfig",
    "finish_model",
    "hookimpl",
    "inner_wrapper",
    "load_recipe",
    "local_compute",
    "model_config",
    "module_replacement",
    "plan_model",
    "replace_modules",
    "shard_model",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'hp_core' has no attribute {name!r}")
    return vars(import_module(_LAZY[name]))[name]


def __dir__() -> list[str]:
    return sorted(__all__)
