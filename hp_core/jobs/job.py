"""What is to run where: the job that a scheduler's file is written for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from hp_core.errors import Problem

if TYPE_CHECKING:
    from hp_core.config.models import TrainerConfig


@dataclass(frozen=True)
class Job:
    """A recipe on `nodes` machines with `nproc` processes each.

    `overrides` are recipe values as typed on the command line, `plugins` those that the command line adds, `gpus` and
    `cpus` the devices of one machine (None leaves them to the scheduler), `memory` its memory as the scheduler writes
    it. `workdir` is where the recipe's relative paths start; `resumes` says that the scheduler starts the job again
    after an interruption.
    """

    recipe: str
    name: str
    nodes: int
    nproc: int
    workdir: str
    overrides: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    gpus: int = 0
    cpus: int | None = None
    memory: str | None = None
    resumes: bool = True

    def overrides_with(self, added: Mapping[str, str]) -> list[str]:
        """The recipe values as options: the user's, but for those that the job sets itself, and the job's."""
        return replaced(self.overrides, added)

    def arguments(self, added: Mapping[str, str] = MappingProxyType({})) -> list[str]:
        """The arguments of `hp-train`."""
        plugins = [word for name in self.plugins for word in ("--plugin", name)]
        return ["train", self.recipe, *plugins, *self.overrides_with(added)]


def replaced(overrides: Iterable[str], added: Mapping[str, str]) -> list[str]:
    """Recipe values as options, with `added` in the place of those that have the same name."""
    kept = [one for one in overrides if one.partition("=")[0].removeprefix("--") not in added]
    return [*kept, *(f"--{key}={value}" for key, value in added.items())]


def default_name(recipe: str) -> str:
    """A job's name after its recipe: its file's name, or its folder's when the file is just `recipe.yaml`."""
    path = Path(recipe)
    return path.resolve().parent.name if path.stem == "recipe" else path.stem


def open_number_of_nodes(asked: int | None, config: TrainerConfig) -> Iterator[Problem]:
    """Yield a problem if the recipe leaves the number of machines open, which a scheduler is asked for."""
    nodes = config.launch.nnodes
    if asked is None and not isinstance(nodes, int):
        message = f"{nodes!r} leaves the number of machines open, and a job asks for a certain one"
        yield Problem(message, path="launch.nnodes", hint=f"give --nodes {nodes.rpartition(':')[2]}")


def number_of_nodes(asked: int | None, config: TrainerConfig) -> int:
    """The machines to ask a scheduler for; the most that the recipe can use where it leaves that open."""
    return asked if asked is not None else config.launch.max_nodes


def number_of_gpus(asked: int | None, nproc: int, config: TrainerConfig) -> int:
    """The GPUs of one machine: one a process, unless the recipe trains on the CPU."""
    if asked is not None:
        return asked
    return 0 if config.training.device == "cpu" else nproc


def contradictions(job: Job, config: TrainerConfig) -> Iterator[Problem]:
    """Yield what the job and its recipe disagree about, for any scheduler."""
    if config.training.device == "cpu" and job.gpus:
        hint = "leave --gpus out, or change training.device"
        yield Problem(f"--gpus {job.gpus}: the recipe trains on the CPU", path="training.device", hint=hint)
    elif 0 < job.gpus < job.nproc:
        hint = f"give --gpus {job.nproc}, or --nproc {job.gpus}"
        yield Problem(f"--gpus {job.gpus}: {job.nproc} processes need a GPU each", hint=hint)
    elif job.gpus == 0 and config.training.device == "cuda":
        yield Problem("--gpus 0: the recipe trains on GPUs", path="training.device", hint=f"give --gpus {job.nproc}")
    resume = config.checkpoint.resume
    if job.resumes and resume not in (None, "latest"):
        message = f"{resume!r}: a job that is started again goes on from its own newest checkpoint, not from there"
        hint = "write resume: latest and the output_dir of that run, or tell the scheduler never to start it again"
        yield Problem(message, path="checkpoint.resume", hint=hint)


def resuming(job: Job, config: TrainerConfig, output_dir: str) -> dict[str, str]:
    """The recipe values that let a job which is started again go on where it was; `output_dir` if it has none."""
    added = {}
    if job.resumes and config.checkpoint.resume is None:
        added["checkpoint.resume"] = "latest"
    if config.output_dir is None:
        added["output_dir"] = output_dir
    return added


def processes(job: Job, config: TrainerConfig, *, endpoint: str, run_id: str, node_rank: str | None) -> dict[str, str]:
    """The recipe values by which `hp-train` starts the processes of a machine, which meets the others."""
    added = {"launch.nproc": str(job.nproc), "launch.nnodes": str(job.nodes)}
    if job.nodes > 1:
        added |= {"launch.rdzv_endpoint": endpoint, "launch.rdzv_id": run_id}
        added |= {} if node_rank is None else {"launch.node_rank": node_rank}
    # What the recipe says of other machines, or of one of them.
    written = {f"launch.{key}": getattr(config.launch, key) for key in ("rdzv_endpoint", "rdzv_id", "node_rank")}
    return added | {key: "null" for key, value in written.items() if value is not None and key not in added}


def positive(number: int | None, option: str, least: int = 1) -> Iterator[Problem]:
    """Yield a problem with an option's number that is too small."""
    if number is not None and number < least:
        yield Problem(f"{option} {number}: expected at least {least}")


def fitting(value: str | None, option: str, pattern: str, expected: str, hint: str = "") -> Iterator[Problem]:
    """Yield a problem with an option's value that is not of the form it must have."""
    if value is not None and re.fullmatch(pattern, value) is None:
        yield Problem(f"{option} {value!r}: expected {expected}", hint=hint)
