"""The sizes of all parallel axes, checked against the number of processes before any is started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from hp_core.config.launch import LaunchConfig
from hp_core.config.models import AcceleratorConfig, FsdpConfig, TrainerConfig
from hp_core.errors import InputError, Problem
from hp_core.parallel.context.method import config_problems, head_problems
from hp_core.parallel.expert.count import expert_problems
from hp_core.parallel.known import known_config
from hp_core.parallel.pipeline.sizes import pipeline_problems, stage_problems
from hp_core.parallel.plan.shapes import sizes_in_config


@dataclass(frozen=True)
class ParallelSizes:
    """How many ranks share what. The axes of the dense mesh come first, in its order: the last varies fastest.

    `ep` is no axis beside the others: its ranks are taken from those of `dp_shard`, `cp` and `tp`.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def dense(self) -> dict[str, int]:
        """The axes of the dense mesh, outermost first."""
        return {axis: size for axis, size in self.all.items() if axis != "ep"}

    @property
    def all(self) -> dict[str, int]:
        """Every size by axis."""
        return asdict(self)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return prod(self.dense.values())

    @property
    def dp(self) -> int:
        """Data ranks: those that read different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def model(self) -> int:
        """Ranks that work on the same rows."""
        return self.pp * self.cp * self.tp


def parallel_sizes(config: TrainerConfig, world_size: int) -> ParallelSizes:
    """The sizes that a recipe gives `world_size` ranks.

    Raises:
        InputError: with everything that doesn't fit, and what would.
    """
    problems = list(_problems(config, world_size))
    if problems:
        raise InputError(problems)
    accelerator = config.accelerator
    pp, cp, tp = accelerator.pp_size, accelerator.cp_size, accelerator.tp_size
    replicate, shard = data_sizes(config.fsdp_config, world_size // (pp * cp * tp))
    return ParallelSizes(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, ep=accelerator.ep_size)


def check_sizes(config: TrainerConfig, world_size: int, model: Mapping[str, Any] | None = None) -> None:
    """Refuse sizes that don't fit `world_size` ranks or the recipe's model, all of them at once.

    Args:
        config: the recipe.
        world_size: the number of ranks.
        model: all values of the model's configuration, if they are known; else those that the recipe writes count.

    Raises:
        InputError: with what would work, for each.
    """
    problems = list(_problems(config, world_size))
    accelerator, values = config.accelerator, known_config(config.model) if model is None else model
    problems += expert_problems(values, accelerator.ep_size, is_complete=model is not None)
    known_sizes = sizes_in_config(values)
    problems += known_sizes.problems(accelerator.tp_size)
    problems += head_problems(known_sizes, accelerator)
    if accelerator.cp_size > 1:
        problems += config_problems(values)
    problems += stage_problems(accelerator, values)
    problems += _attention_problems(config)
    if problems:
        raise InputError(problems)


def _attention_problems(config: TrainerConfig) -> Iterator[Problem]:
    written = config.model.arguments.get("attn_implementation", "sdpa")
    if config.accelerator.cp_size > 1 and written != "sdpa":
        message = f"context parallelism needs the attention of torch, and the model uses {written!r}"
        yield Problem(message, path="accelerator.cp_size", hint="write model.attn_implementation: sdpa")


def _problems(config: TrainerConfig, world_size: int) -> Iterator[Problem]:
    yield from _tensor_problems(config.accelerator)
    try:
        num_data_ranks = _num_data_ranks(config.accelerator, world_size)
    except InputError as error:
        yield from error.problems
        return
    try:
        data_sizes(config.fsdp_config, num_data_ranks)
    except InputError as error:
        yield from error.problems
    else:
        yield from _expert_problems(config, num_data_ranks)
        yield from _prefetch_problems(config, num_data_ranks)
    yield from pipeline_problems(config, num_data_ranks)
    training = config.training
    share = num_data_ranks * training.micro_batch_size
    if training.global_batch_size % share:
        below = training.global_batch_size // share * share
        works = f"{below} or {below + share}" if below else f"{share}"
        kind = "data rank" if config.accelerator != AcceleratorConfig() else "rank"
        yield Problem(
            f"{training.global_batch_size} rows can't be cut into micro-batches of {training.micro_batch_size} on "
            f"{num_data_ranks} {kind}{'s' * (num_data_ranks > 1)}{_started(config.launch, world_size)}",
            path="training.global_batch_size",
            hint=f"use a multiple of {share}: {works}",
        )


def _started(launch: LaunchConfig, world_size: int) -> str:
    """The options by which there are so many ranks; nothing where torchrun or Slurm has started them."""
    if world_size == 1 or launch.num_processes != world_size:
        return ""
    options = [f"--nproc {launch.nproc}"] if launch.nproc > 1 else []
    options += [f"--nnodes {launch.nnodes}"] if launch.max_nodes > 1 else []
    return f" ({' '.join(options)})"


def _expert_problems(config: TrainerConfig, num_data_ranks: int) -> Iterator[Problem]:
    accelerator = config.accelerator
    ep_size, path = accelerator.ep_size, "accelerator.ep_size"
    if ep_size == 1:
        return
    _, shard = data_sizes(config.fsdp_config, num_data_ranks)
    tp_size = accelerator.tp_size
    ranks = shard * accelerator.cp_size * tp_size
    if ranks % ep_size:
        works = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
        holders = f"dp_shard_size {shard} x cp_size {accelerator.cp_size}"
        holders += f" x tp_size {tp_size}" if tp_size > 1 else ""
        message = f"{ep_size} does not divide {holders}, the ranks that experts can be spread over"
        yield Problem(message, path=path, hint=f"ep_size that would: {works}")


def _prefetch_problems(config: TrainerConfig, num_data_ranks: int) -> Iterator[Problem]:
    _, shard = data_sizes(config.fsdp_config, num_data_ranks)
    if shard * config.accelerator.cp_size > 1:
        return
    fsdp, unset = config.fsdp_config, FsdpConfig()
    for key, value, default in (
        ("forward_prefetch", fsdp.forward_prefetch, unset.forward_prefetch),
        ("backward_prefetch", fsdp.backward_prefetch, unset.backward_prefetch),
    ):
        if value != default:
            message = "each rank holds all of the parameters that it computes with, so none are gathered"
            yield Problem(message, path=f"fsdp_config.{key}", hint=f"remove '{key}', or start more data ranks")


def _tensor_problems(accelerator: AcceleratorConfig) -> Iterator[Problem]:
    flags = {"sequence_parallel": accelerator.sequence_parallel, "loss_parallel": accelerator.loss_parallel}
    for key in (key for key, is_set in flags.items() if is_set):
        path = f"accelerator.{key}"
        if accelerator.tp_size == 1:
            hint = f"set accelerator.tp_size to 2 or more, or remove '{key}'"
            yield Problem("there is one tensor rank, which has nothing to share", path=path, hint=hint)


def _num_data_ranks(config: AcceleratorConfig, world_size: int) -> int:
    written = {"pp_size": config.pp_size, "cp_size": config.cp_size, "tp_size": config.tp_size}
    model = prod(written.values())
    if world_size % model:
        product = " x ".join(f"{key} {size}" for key, size in written.items() if size > 1)
        works = ", ".join(str(n * model) for n in range(1, 5))
        message = (
            f"{product} needs a multiple of {model} ranks, and there {'is' if world_size == 1 else 'are'} {world_size}"
        )
        fitting = [size for size in range(1, world_size + 1) if world_size % size == 0]
        hint = f"start {works} … ranks, or make the product one of {', '.join(map(str, fitting))}"
        raise InputError(Problem(message, path="accelerator", hint=hint))
    return world_size // model


def data_sizes(config: FsdpConfig, num_data_ranks: int) -> tuple[int, int]:
    """`(dp_replicate_size, dp_shard_size)` for so many data ranks.

    Raises:
        InputError: the product is another number; the message lists what would work.
    """
    replicate = config.dp_replicate_size
    shard = config.dp_shard_size
    if shard is None and num_data_ranks % replicate == 0:
        shard = num_data_ranks // replicate
    if shard is None or replicate * shard != num_data_ranks:
        works = ", ".join(
            f"{n} x {num_data_ranks // n}" for n in range(1, num_data_ranks + 1) if num_data_ranks % n == 0
        )
        written = f"dp_replicate_size {replicate}" + ("" if shard is None else f" x dp_shard_size {shard}")
        raise InputError(
            Problem(
                f"{written} does not make {num_data_ranks} ranks",
                path="fsdp_config",
                hint=f"replicate x shard that would: {works}",
            )
        )
    return replicate, shard
