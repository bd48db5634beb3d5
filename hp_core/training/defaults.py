"""What each building hook does when no plugin answers it: build the component that the recipe names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hp_core.config import TrainerConfig
from hp_core.config.signature import Signature
from hp_core.config.target import Target
from hp_core.errors import InputError, Problem
from hp_core.hookspecs import hookimpl
from hp_core.training.loss import BindsModel, ModelOutputLoss, PreparesModelInputs


def require_taken(model: Target, features: Mapping[str, Any]) -> None:
    """Refuse features that a model component has no argument for: they would be left out without a word.

    Raises:
        InputError: names each.
    """
    asked = {name: value for name, value in features.items() if value is not None}
    taken = Signature.of(model.load()).accepted(asked)
    problems = [
        Problem(
            f"the model {model.spelling!r} can't have it: it takes no {name!r}",
            path=name.removesuffix("_config"),
            hint=f"remove it, or have the model take {name} and hand it to hp_core.finish_model",
        )
        for name in asked
        if name not in taken
    ]
    if problems:
        raise InputError(problems)


class DefaultHooks:
    """The core's own hook implementations; a plugin's answer comes first."""

    @hookimpl(trylast=True)
    def build_model(
        self,
        config: TrainerConfig,
        distributed_setup: Any,
        peft_config: Any,
        activation_checkpoint: Any,
        activation_swap: Any,
        compile_config: Any,
    ) -> Any:
        """Build the recipe's `model`, which must take what the recipe asks for."""
        features = {
            "peft_config": peft_config,
            "activation_checkpoint": activation_checkpoint,
            "activation_swap": activation_swap,
            "compile_config": compile_config,
        }
        require_taken(config.model, features)
        return config.model.build(distributed_setup=distributed_setup, **features)

    @hookimpl(trylast=True)
    def replace_module(self, module: nn.Module, module_fqn: str, context: Any) -> Any:
        """Call the factory that the matching entry of `plan_overrides` names."""
        return context.target.build(module=module, module_fqn=module_fqn, context=context)

    @hookimpl(trylast=True)
    def build_loss(self, config: TrainerConfig) -> Any:
        """Build the recipe's `loss_fn`, or take the loss the model computes."""
        if config.loss_fn is None:
            return ModelOutputLoss()
        return config.loss_fn.build()

    @hookimpl(trylast=True)
    def bind_model(self, loss_fn: nn.Module, model: nn.Module, distributed_setup: Any) -> None:
        """Call the loss's own `bind_model`, if it has one."""
        if isinstance(loss_fn, BindsModel):
            loss_fn.bind_model(model=model, distributed_setup=distributed_setup)

    @hookimpl(trylast=True)
    def prepare_model_inputs(
        self, loss_fn: nn.Module, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]
    ) -> dict[str, Any]:
        """Call the loss's own `prepare_model_inputs`, if it has one."""
        if isinstance(loss_fn, PreparesModelInputs):
            return loss_fn.prepare_model_inputs(model_inputs=model_inputs, loss_inputs=loss_inputs)
        return model_inputs

    @hookimpl(trylast=True)
    def build_optimizer(self, config: TrainerConfig, model: nn.Module) -> Any:
        """Build the recipe's `optimizer`."""
        return config.optimizer.build(model=model)

    @hookimpl(trylast=True)
    def build_lr_scheduler(self, config: TrainerConfig, optimizer: Optimizer, train_iters: int) -> Any:
        """Build the recipe's `lr_scheduler`, or keep the learning rate constant."""
        if config.lr_scheduler is None:
            return LambdaLR(optimizer, lambda _: 1.0)
        return config.lr_scheduler.build(optimizer=optimizer, train_iters=train_iters)

    @hookimpl(trylast=True)
    def build_dataset(
        self, config: TrainerConfig, transform: Any, tokenizer: Any, mesh_context: Any, training_config: Any
    ) -> Any:
        """Build the recipe's `dataset`."""
        return config.dataset.source.build(
            transform=transform, tokenizer=tokenizer, mesh_context=mesh_context, training_config=training_config
        )

    @hookimpl(trylast=True)
    def build_dataloader(
        self,
        config: TrainerConfig,
        dataset: Any,
        collate_fn: Any,
        batch_sampler: Any,
        batch_size: int,
        dp_world_size: int,
        max_seq_len: int,
        seed: int,
    ) -> Any:
        """Build the recipe's `dataloader`."""
        return config.dataloader.loader.build(
            dataset=dataset,
            collate_fn=collate_fn,
            batch_sampler=batch_sampler,
            batch_size=batch_size,
            dp_world_size=dp_world_size,
            max_seq_len=max_seq_len,
            seed=seed,
        )
