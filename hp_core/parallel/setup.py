"""The one owner of the process group, the device and the meshes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_core.config.models import AcceleratorConfig, FsdpConfig, MixedPrecisionConfig, TrainerConfig, TrainingConfig
from hp_core.cpus import usable_cpus
from hp_core.errors import InputError, Problem
from hp_core.parallel.agreement import require_same_recipes
from hp_core.parallel.attempts import Attempts, of_run
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.pipeline.schedules import SCHEDULES, num_stages
from hp_core.parallel.sizes import ParallelSizes, parallel_sizes

if TYPE_CHECKING:
    from hp_core.model.replacement.replacer import ModuleReplacer
    from hp_core.parallel.plan.planner import Planner


@dataclass(frozen=True)
class DistributedSetup:
    """Process group, device and meshes of a run; nobody else makes any of them.

    It also carries what a model builder needs to finish a model: `fsdp`, `precision`, the `seed` of the weights and
    the `replacer` of modules and the `planner` of sharding.

    `mesh` has the axes `pp`, `dp_replicate`, `fsdp` and `tp`; `fsdp`, over which parameters are sharded, is `dp_shard`
    and `cp` together. `fsdp_mesh` has the two in the middle, or `fsdp` alone for a single copy, and `cp_mesh` the ranks
    that share a sequence.
    `expert_mesh`, where experts are spread, takes the ranks of `fsdp` and `tp` apart: along `ep` they hold other
    experts, along `efsdp` shards of the same; its first axis is `dp_replicate`.
    `attempts` is what a run that was started over by its launcher knows of the attempts before.
    `host_group` reduces numbers that live on the host (token counts, metrics) without waiting for the accelerator; it
    spans all ranks.
    """

    environment: ProcessEnvironment
    device: torch.device
    backend: str
    sizes: ParallelSizes
    mesh: DeviceMesh
    fsdp_mesh: DeviceMesh
    cp_mesh: DeviceMesh
    host_group: dist.ProcessGroup
    accelerator: AcceleratorConfig
    fsdp: FsdpConfig
    precision: MixedPrecisionConfig
    seed: int
    replacer: ModuleReplacer | None = None
    planner: Planner | None = None
    expert_mesh: DeviceMesh | None = None
    attempts: Attempts = field(default_factory=Attempts)

    @property
    def rank(self) -> int:
        """This process's rank in the world."""
        return self.environment.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.environment.world_size

    @property
    def dp_size(self) -> int:
        """The number of data ranks: those that see different rows."""
        return self.sizes.dp

    @property
    def dp_rank(self) -> int:
        """This process's rank among the data ranks."""
        return self.axis_rank("dp_replicate") * self.sizes.dp_shard + self.axis_rank("dp_shard")

    @property
    def token_rank(self) -> int:
        """This process's rank among those that see different tokens: data and context ranks."""
        return self.dp_rank * self.sizes.cp + self.axis_rank("cp")

    @property
    def random_rank(self) -> int:
        """This process's rank among those that drop other activations: of other tokens, or of other layers."""
        num_token_ranks = self.sizes.dp * self.sizes.cp
        return self.axis_rank("pp") * num_token_ranks + self.token_rank

    @property
    def alone(self) -> DistributedSetup:
        """What this process would be without the others, for trials that each makes by itself."""
        alone = ProcessEnvironment(master_addr=self.environment.master_addr)
        return replace(
            self,
            environment=alone,
            sizes=ParallelSizes(),
            accelerator=AcceleratorConfig(),
            replacer=None,
            expert_mesh=None,
        )

    def axis_rank(self, axis: str) -> int:
        """This process's rank along one axis of the dense mesh, read off its rank in the world."""
        rank = self.rank
        for name, size in reversed(self.sizes.dense.items()):
            if name == axis:
                return rank % size
            rank //= size
        raise KeyError(axis)

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank speaks for its tokens: of the ranks that have the same, the one with the last stage."""
        return self.axis_rank("tp") == 0 and self.has_last_stage

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank has the model's head, and so computes the loss; True without pipeline ranks."""
        schedule = SCHEDULES[self.accelerator.pp_schedule]
        return self.axis_rank("pp") == schedule.rank_of(num_stages(self.accelerator, self.sizes.pp) - 1, self.sizes.pp)

    def sum_on_host(self, values: Sequence[int], of_all: Sequence[int] = ()) -> list[int]:
        """Sum integers exactly (int64) over the ranks that count tokens, without touching the accelerator.

        Those `of_all` are summed over all ranks, in the same collective; their sums follow the others.
        """
        if self.world_size == 1:
            return [*values, *of_all]
        counted = [value * self.counts_tokens for value in values]
        tensor = torch.tensor([*counted, *of_all], dtype=torch.int64)
        dist.all_reduce(tensor, group=self.host_group)
        return [int(value) for value in tensor.tolist()]

    def any_on_host(self, value: bool) -> bool:
        """Whether `value` is true on any rank. Every rank calls it."""
        return self.sum_on_host([], [int(value)]) != [0]

    def gather_on_host(self, values: list[float]) -> list[list[float]]:
        """The rows of `values` (same length everywhere) of all ranks but repeated tensor ranks, in one collective."""
        if self.world_size == 1:
            return [list(values)]
        row = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        dist.all_gather(rows, row, group=self.host_group)
        # The tensor axis varies fastest.
        return [[float(value) for value in row.tolist()] for row in rows[:: self.sizes.tp]]

    def sum_tensors(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sum tensors of one dtype over all ranks but repeated tensor ranks, in one collective on the device.

        All ranks give the same shapes; those of a pipeline what their own layers do.
        """
        if self.world_size == 1 or not tensors:
            return list(tensors)
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        if self.axis_rank("tp") > 0:
            flat = torch.zeros_like(flat)
        dist.all_reduce(flat)
        sizes = [tensor.numel() for tensor in tensors]
        return [part.reshape(tensor.shape) for part, tensor in zip(flat.split(sizes), tensors, strict=True)]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            dist.barrier(group=self.host_group)


@contextmanager
def distributed(
    environment: ProcessEnvironment, config: TrainerConfig, digests: Mapping[str, str] | None = None
) -> Iterator[DistributedSetup]:
    """Start the process group and the meshes of a recipe, and take them down again.

    `digests` are what the ranks' recipes are compared by, as `hp_core.config.digest` makes them.

    Raises:
        InputError: the sizes don't make the world, the device or backend isn't there, or another rank has another
            recipe.
    """
    parallel_sizes(config, environment.world_size)  # before any rank waits for another
    training = config.training
    device = _device(environment, training)
    backend = _backend(device, training)
    limit = timedelta(seconds=config.launch.timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # A parameter that two axes share along one dimension is gathered in two steps; every rank would warn of it.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # What fails in a stage is told once; torch would print the whole schedule before.
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    store = of_run(environment.run_id, _store(environment, limit))
    # gloo finds the keys of a dead attempt and fails to connect unless each attempt has its own.
    attempt = dist.PrefixStore(f"attempt_{environment.attempt}", store)
    if digests is not None:
        require_same_recipes(digests, environment, attempt)
    dist.init_process_group(
        backend,
        store=attempt,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=limit,
        device_id=device if backend == "nccl" else None,
    )
    try:
        host_group = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=limit)
        assert host_group is not None
        setup = setup_of(environment, config, device=device, backend=backend, host_group=host_group)
        yield replace(setup, attempts=Attempts(environment.attempt, store))
    finally:
        # Never a collective here: when one rank fails, the others would wait for it.
        dist.destroy_process_group()


def setup_of(
    environment: ProcessEnvironment,
    config: TrainerConfig,
    *,
    device: torch.device,
    backend: str,
    host_group: dist.ProcessGroup,
) -> DistributedSetup:
    """The meshes of a recipe, once its process group is there.

    Raises:
        InputError: the sizes don't make the world.
    """
    sizes = parallel_sizes(config, environment.world_size)
    fsdp = sizes.dp_shard * sizes.cp
    # What experts cut anew is one axis here: an axis that is made of two can't be named in a slice.
    axes = {"pp": sizes.pp, "dp_replicate": sizes.dp_replicate, "shared": fsdp * sizes.tp}
    stages = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    mesh = stages._unflatten(2, (fsdp, sizes.tp), ("fsdp", "tp"))
    shared = mesh["fsdp"]._unflatten(0, (sizes.dp_shard, sizes.cp), ("dp_shard", "cp"))
    return DistributedSetup(
        environment=environment,
        device=device,
        backend=backend,
        sizes=sizes,
        mesh=mesh,
        # Of one copy there is nobody to exchange sums of gradients with.
        fsdp_mesh=mesh["dp_replicate", "fsdp"] if sizes.dp_replicate > 1 else mesh["fsdp"],
        cp_mesh=shared["cp"],
        host_group=host_group,
        accelerator=config.accelerator,
        fsdp=config.fsdp_config,
        precision=config.mixed_precision,
        seed=config.training.seed,
        expert_mesh=_expert_mesh(stages, sizes),
    )


def _expert_mesh(stages: DeviceMesh, sizes: ParallelSizes) -> DeviceMesh | None:
    if sizes.ep == 1:
        return None
    num_shards = sizes.dp_shard * sizes.cp * sizes.tp // sizes.ep
    return stages["dp_replicate", "shared"]._unflatten(1, (num_shards, sizes.ep), ("efsdp", "ep"))


def _device(environment: ProcessEnvironment, training: TrainingConfig) -> torch.device:
    kind = training.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError(Problem("no CUDA device is visible", path="training.device", hint="write device: cpu"))
    if environment.local_rank >= torch.cuda.device_count():
        raise InputError(
            f"local rank {environment.local_rank} has no GPU: {torch.cuda.device_count()} are visible on this host; "
            f"start at most {torch.cuda.device_count()} processes a host"
        )
    return torch.device("cuda", environment.local_rank)


def _backend(device: torch.device, training: TrainingConfig) -> str:
    backend = training.backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type == "cpu":
        raise InputError(
            Problem("nccl does not run on the CPU", path="training.backend", hint="write backend: gloo or leave it out")
        )
    return backend


def _store(environment: ProcessEnvironment, timeout: timedelta) -> dist.Store:
    if environment.launcher == "none":
        return dist.HashStore()
    return dist.TCPStore(
        environment.master_addr,
        environment.master_port,
        environment.world_size,
        is_master=environment.rank == 0 and not environment.store_is_hosted,
        timeout=timeout,
        # Several workers of one host may ask for the agent's store at once, and the agent is not a client of it.
        multi_tenant=True,
    )


def default_threads(num_processes: int) -> int:
    """Compute threads for each of `num_processes` on this host: the cores it may use, shared evenly."""
    return max(1, usable_cpus() // num_processes)
