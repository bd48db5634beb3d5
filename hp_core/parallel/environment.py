"""Who am I among the processes of this run: alone, under torchrun, or under Slurm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hp_core.errors import InputError


@dataclass(frozen=True)
class ProcessEnvironment:
    """This process's place in the run, as its launcher tells it.

    `launcher` is `none`, `torchrun` (the elastic agent of `hp-train --nproc` as well) or `slurm`. `attempt` counts
    the restarts of the elastic agent, `run_id` is the agent's name for the run.
    """

    launcher: str = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    store_is_hosted: bool = False
    attempt: int = 0
    run_id: str = ""

    @property
    def is_main(self) -> bool:
        """True on the one process that writes files and talks to the terminal."""
        return self.rank == 0


def detect(env: Mapping[str, str]) -> ProcessEnvironment:
    """Read the launcher's variables from `env`.

    Raises:
        InputError: a launcher's variable is missing, is not a number, or names a rank outside the world.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return ProcessEnvironment(
            launcher="torchrun",
            rank=_rank(env, "RANK", "WORLD_SIZE"),
            world_size=_number(env, "WORLD_SIZE"),
            local_rank=_number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else 0,
            master_addr=_text(env, "MASTER_ADDR"),
            master_port=_number(env, "MASTER_PORT"),
            store_is_hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=_number(env, "TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in env else 0,
            run_id=env.get("TORCHELASTIC_RUN_ID", ""),
        )
    # A batch script has SLURM_PROCID too; only a step started by srun has a step id and is one rank of many.
    if "SLURM_STEP_ID" in env and _number(env, "SLURM_NTASKS") > 1:
        return ProcessEnvironment(
            launcher="slurm",
            rank=_rank(env, "SLURM_PROCID", "SLURM_NTASKS"),
            world_size=_number(env, "SLURM_NTASKS"),
            local_rank=_number(env, "SLURM_LOCALID"),
            master_addr=env.get("MASTER_ADDR") or first_host(_text(env, "SLURM_STEP_NODELIST")),
            # Jobs that share a node differ in their id; the range stays clear of the ephemeral ports.
            master_port=_number(env, "MASTER_PORT")
            if env.get("MASTER_PORT")
            else 12000 + _number(env, "SLURM_JOB_ID") % 20000,
        )
    return ProcessEnvironment()


def first_host(node_list: str) -> str:
    """The first host of a Slurm node list: `gpu[03-07,12],login1` gives `gpu03`, `r[1-2]n[4-9]` gives `r1n4`.

    Raises:
        InputError: it is no node list.
    """
    match = re.match(r"(?:[^,\[\]]|\[\w[^\[\]]*\])+(?=,|$)", node_list)
    if match is None:
        raise InputError(f"SLURM_STEP_NODELIST: can't read the node list {node_list!r}")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match.group())


def _text(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "")
    if not value:
        raise InputError(f"environment variable {name} is not set; start with torchrun, srun or `hp-train --nproc N`")
    return value


def _rank(env: Mapping[str, str], name: str, size: str) -> int:
    rank, world_size = _number(env, name), _number(env, size)
    if not 0 <= rank < world_size:
        raise InputError(f"environment variable {name}: rank {rank} is not one of {size} {world_size}")
    return rank


def _number(env: Mapping[str, str], name: str) -> int:
    text = _text(env, name)
    try:
        return int(text)
    except ValueError:
        raise InputError(f"environment variable {name}: expected a whole number, got {text!r}") from None
