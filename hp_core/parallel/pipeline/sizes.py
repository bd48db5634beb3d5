"""What of a pipeline's sizes doesn't fit, with what would; without torch and before a process starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hp_core.config.models import AcceleratorConfig, TrainerConfig
from hp_core.errors import Problem
from hp_core.parallel.pipeline.schedules import SCHEDULES, num_stages


def pipeline_problems(config: TrainerConfig, num_data_ranks: int) -> Iterator[Problem]:
    """Keys that contradict each other, and steps of too few micro-batches."""
    accelerator = config.accelerator
    if accelerator.pp_size == 1:
        if accelerator.pp_layers is not None:
            message, hint = "there are no stages to give layers to", "set pp_size, or remove 'pp_layers'"
            yield Problem(message, path="accelerator.pp_layers", hint=hint)
        return
    schedule, path = SCHEDULES[accelerator.pp_schedule], "accelerator.pp_stages_per_rank"
    stages = accelerator.pp_stages_per_rank
    if stages is not None and stages != 1 and not schedule.is_interleaved:
        hint = "write pp_schedule: interleaved_1f1b, or remove 'pp_stages_per_rank'"
        yield Problem(f"{schedule.name} has 1 stage for each rank, not {stages}", path=path, hint=hint)
    elif stages is not None and stages != 2 and schedule.placement == "v":
        yield Problem(f"{schedule.name} has 2 stages for each rank, not {stages}", path=path, hint="write 2")
    elif stages == 1 and schedule.is_interleaved:
        yield Problem(f"{schedule.name} has several stages for each rank", path=path, hint="write 2 or more")
    if schedule.splits_backward and config.fsdp_config.reshard_after_forward:
        message = f"{schedule.name} computes the gradients of a layer's weights later, which then aren't there"
        yield Problem(message, path="fsdp_config.reshard_after_forward", hint="write false, or leave it out")
    number = num_stages(accelerator, accelerator.pp_size)
    if accelerator.pp_layers is not None and len(accelerator.pp_layers) != number:
        message = f"{len(accelerator.pp_layers)} stages are given layers, and there are {number}"
        yield Problem(message, path="accelerator.pp_layers", hint=f"write {number} numbers")
    training = config.training
    share = num_data_ranks * training.micro_batch_size
    number, rest = divmod(training.global_batch_size, share)
    if not rest and not schedule.takes(number, accelerator.pp_size):
        works = schedule.at_least(number, accelerator.pp_size)
        message = f"{number} micro-batches a step are not what {schedule.name} takes on {accelerator.pp_size} ranks"
        hint = f"use {works * share} rows: {works} micro-batches of {training.micro_batch_size} a data rank"
        yield Problem(message, path="training.global_batch_size", hint=hint)


def stage_problems(config: AcceleratorConfig, model: Mapping[str, Any]) -> Iterator[Problem]:
    """A model of fewer layers than stages, or of others than are given to them, as far as its values are at hand."""
    layers = model.get("num_hidden_layers")
    if config.pp_size == 1 or not isinstance(layers, int):
        return
    if layers < num_stages(config, config.pp_size):
        message = f"{num_stages(config, config.pp_size)} stages need as many layers, and the model has {layers}"
        works = [
            size
            for size in range(1, layers + 1)
            if size * num_stages(config, config.pp_size) // config.pp_size <= layers
        ]
        yield Problem(message, path="accelerator.pp_size", hint=f"pp_size that would: {', '.join(map(str, works))}")
    elif config.pp_layers is not None and sum(config.pp_layers) != layers:
        message = f"{sum(config.pp_layers)} layers are given to stages, and the model has {layers}"
        yield Problem(message, path="accelerator.pp_layers", hint=f"let them add up to {layers}")
    schedule, is_tied = SCHEDULES[config.pp_schedule], model.get("tie_word_embeddings")
    if is_tied and schedule.placement == "v":
        message = f"{schedule.name} has the first and the last stage on one rank, which ties their weights"
        hint = "use another schedule for a model whose embedding is its head"
        yield Problem(message, path="accelerator.pp_schedule", hint=hint)
