"""Tries a recipe's loss on a tiny model that stands in for the recipe's own, without its data and weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hp_core.config import TrainerConfig
from hp_core.config.target import Target
from hp_core.entry_points import describe
from hp_core.errors import HpError, InputError, Problem, RunError
from hp_core.model.tiny import FAMILIES, tiny_model
from hp_core.parallel.expert.count import NUM_EXPERTS_KEYS
from hp_core.parallel.setup import DistributedSetup
from hp_core.parallel.tiny import tiny_setup
from hp_core.plugins import Plugins
from hp_core.training.accounting import MicroBatch
from hp_core.training.base import BaseTrainer
from hp_core.training.built import as_module, require_loss_call, require_without_parameters
from hp_core.training.columns import column_arguments
from hp_core.training.loss import LossContract, contract_of
from hp_core.training.loss_check import Diagnosis, diagnose
from hp_core.training.loss_rows import LENGTH, NUM_IDS, Batch
from hp_core.training.startup import require_on_shards, told_of_the_loss

_DENSE_FAMILY, _EXPERTS_FAMILY = "llama", "qwen3_moe"
# Initial logits are nearly equal, and so are then the costs of all tokens.
_HEAD_SCALE = 8.0


@dataclass(frozen=True)
class Trial:
    """What came of trying a loss; `not_tried` says why it can't be called on the model that stands in."""

    diagnosis: Diagnosis = field(default_factory=Diagnosis)
    not_tried: str | None = None


@dataclass(frozen=True)
class StandIn:
    """A tiny model: its family, and whether the recipe's model is of that family, too."""

    family: str
    is_own_family: bool
    vocab_size: int | None = None

    @classmethod
    def of(cls, config: TrainerConfig) -> StandIn:
        """What stands in for a recipe's model."""
        return cls._of(config.model)

    @classmethod
    def _of(cls, model: Target) -> StandIn:
        arguments = model.arguments
        given = arguments.get("config")
        values: dict[str, Any] = _stored_config(arguments)
        values |= given if isinstance(given, Mapping) else {}
        known = [name for name, one in FAMILIES.items() if one["model_type"] == values.get("model_type")]
        vocab_size = values.get("vocab_size")
        return cls(
            known[0] if known else _EXPERTS_FAMILY if set(NUM_EXPERTS_KEYS) & set(values) else _DENSE_FAMILY,
            bool(known),
            max(vocab_size, NUM_IDS) if isinstance(vocab_size, int) else None,
        )

    def instead_of(self, other: Target) -> Target:
        """What stands in for another model that the recipe names, such as a teacher: with this one's vocabulary."""
        path = f"{stand_in_model.__module__}.{stand_in_model.__qualname__}"
        # Of the same weights a teacher would have nothing to teach.
        arguments = {"family": self._of(other).family, "vocab_size": self.vocab_size, "seed": 1}
        return dataclasses.replace(other, name=None, component=None, import_path=path, arguments=arguments)

    def within(self, target: Target) -> Target:
        """A component with tiny models in place of those that it takes, at any depth."""
        arguments = {
            name: value if not isinstance(value, Target) else self.within(value)
            for name, value in target.arguments.items()
        }
        replaced = dataclasses.replace(target, arguments=arguments)
        return self.instead_of(replaced) if target.group == "hp.models" else replaced

    def build(self) -> PreTrainedModel:
        """The model, in training mode."""
        return stand_in_model(self.family, self.vocab_size, seed=0)


def stand_in_model(family: str, vocab_size: int | None, seed: int) -> PreTrainedModel:
    """A tiny model whose logits differ enough to tell how a loss combines tokens."""
    model = tiny_model(family, seed, vocab_size=vocab_size)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(_HEAD_SCALE)
    return model


def _stored_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What the recipe's model directory says; the hub is not asked."""
    pretrained = arguments.get("pretrained")
    path = Path(pretrained).expanduser() / "config.json" if isinstance(pretrained, str) else None
    if path is None or not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}  # building the model tells
    return values if isinstance(values, dict) else {}


def try_loss(config: TrainerConfig, plugins: Plugins, setup: DistributedSetup | None = None) -> Trial:
    """Build the loss with the hooks of `plugins`, and diagnose it on a model that stands in for the recipe's.

    Args:
        config: the recipe.
        plugins: its plugins.
        setup: that of this process, where there is one.

    Raises:
        InputError: the loss can't be built, is no loss that a trainer can call, or raises on a model of the recipe's
            own family.
    """
    stand_in = StandIn.of(config)
    if config.loss_fn is not None:
        config = config.model_copy(update={"loss_fn": stand_in.within(config.loss_fn)})
    with tiny_setup() if setup is None else nullcontext(setup.alone) as alone:
        with told_of_the_loss("can't be built"):
            loss_fn = as_module(plugins.hook.build_loss(config=config), "loss_fn")
        require_on_shards(loss_fn, config.accelerator)
        require_loss_call(loss_fn, contract_of(loss_fn).columns)
        require_without_parameters(loss_fn)
        if not _trains_texts(config.trainer):
            made = f"the batches of trainer {config.trainer.spelling} are its own, and there are only rows of text here"
            return Trial(not_tried=f"{made}; a run is the first to call it")
        try:
            return Trial(diagnosed(loss_fn, stand_in, plugins, alone))
        except Exception as error:
            text = str(error).removeprefix("loss_fn: ") if isinstance(error, HpError) else describe(error)
            if not stand_in.is_own_family:
                kind = f"on a tiny {stand_in.family}, which stands in for the recipe's model, it raises {text}"
                return Trial(not_tried=kind)
            if isinstance(error, InputError):
                raise
            message = f"{type(loss_fn).__name__} raises on a tiny {stand_in.family}: {text}"
            raise InputError(Problem(message, path="loss_fn")) from error


def _trains_texts(trainer: Target) -> bool:
    kind = trainer.load()
    return isinstance(kind, type) and issubclass(kind, BaseTrainer) and kind.trains_texts


def diagnosed(loss_fn: nn.Module, stand_in: StandIn, plugins: Plugins, setup: DistributedSetup) -> Diagnosis:
    """Bind a loss to the tiny model, and diagnose it.

    Raises:
        Exception: whatever the loss, the model or a hook raises.
    """
    model, contract = stand_in.build(), contract_of(loss_fn)
    plugins.hook.bind_model(loss_fn=loss_fn, model=model, distributed_setup=setup)

    def run(batch: Batch) -> tuple[Any, Any]:
        return _call(loss_fn, model, contract, plugins, batch)

    try:
        return diagnose(loss_fn, model, contract, run, backward=True)
    except Exception:
        numbers = [name for name in contract.columns if not name.endswith("_labels") and name != contract.weight_column]
        if not numbers:
            raise
        # A column may hold whole numbers, such as the number of a domain, which a loss looks up in a table.
        fixed = {name: torch.ones(LENGTH, dtype=torch.int64) for name in numbers}
        try:
            return diagnose(loss_fn, model, contract, run, fixed=fixed, backward=True)
        except Exception:
            pass
        raise


def _call(
    loss_fn: nn.Module, model: nn.Module, contract: LossContract, plugins: Plugins, batch: Batch
) -> tuple[Any, Any]:
    """Model and loss, called as the trainer of texts does."""
    labels = batch["labels"]
    columns = {name: batch[name] for name in contract.columns}
    one = MicroBatch.of(
        {
            "input_ids": batch["input_ids"],
            "position_ids": batch["position_ids"],
            "labels": labels,
            "shift_labels": labels,
            "use_cache": False,
        },
        {"labels": labels, **columns},
        contract,
    )
    model_inputs = plugins.hook.prepare_model_inputs(
        loss_fn=loss_fn, model_inputs=one.model_inputs, loss_inputs=one.loss_inputs
    )
    if not isinstance(model_inputs, dict):
        raise RunError(
            f"prepare_model_inputs returned a {type(model_inputs).__name__}, not the dict to call the model with"
        )
    outputs = model(**model_inputs)
    arguments = column_arguments(one.loss_inputs, contract.columns)
    return loss_fn(model_output=outputs, labels=one.loss_inputs["labels"], **arguments), outputs
