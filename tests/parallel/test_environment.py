"""A process's place in the run, from what torchrun and Slurm tell it."""

from __future__ import annotations

import pytest

from hp_core.errors import InputError
from hp_core.parallel.environment import ProcessEnvironment, detect, first_host

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4123456",
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_NODELIST": "gpu[03-07,12],login1",
}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


@pytest.mark.parametrize("env", [{}, {"PATH": "/bin", "MASTER_PORT": "1"}, {"WORLD_SIZE": "4"}])
def test_alone(env):
    environment = detect(env)
    assert environment == ProcessEnvironment("none", 0, 1, 0)
    assert environment.is_main


def test_torchrun():
    environment = detect(TORCHRUN)
    assert environment == ProcessEnvironment("torchrun", 5, 8, 1, "10.0.0.1", 29400, store_is_hosted=True, attempt=2)
    assert not environment.is_main


def test_torchrun_s_extras_may_be_missing():
    env = without(TORCHRUN, "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT")
    assert detect(env) == ProcessEnvironment("torchrun", 5, 8, 0, "10.0.0.1", 29400)
    assert not detect({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}).store_is_hosted


def test_torchrun_inside_a_slurm_step_is_torchrun():
    assert detect({**SLURM, **TORCHRUN}).launcher == "torchrun"


def test_slurm():
    # 12000 + 4123456 % 20000.
    assert detect(SLURM) == ProcessEnvironment("slurm", 6, 16, 2, "gpu03", 15456)


def test_slurm_with_an_address_of_the_user_s():
    environment = detect({**without(SLURM, "SLURM_STEP_NODELIST"), "MASTER_ADDR": "head", "MASTER_PORT": "29500"})
    assert (environment.master_addr, environment.master_port) == ("head", 29500)
    assert detect({**SLURM, "MASTER_ADDR": "", "MASTER_PORT": ""}).master_addr == "gpu03"


@pytest.mark.parametrize(
    "env",
    [
        # A batch script, which has the allocation's numbers but was not started by srun.
        without(SLURM, "SLURM_STEP_ID"),
        # A shell inside the allocation.
        {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
    ],
)
def test_slurm_without_several_tasks_is_alone(env):
    assert detect(env) == ProcessEnvironment()


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
@pytest.mark.parametrize("empty", [False, True])
def test_what_torchrun_must_say(name, empty):
    env = {**TORCHRUN, name: ""} if empty else without(TORCHRUN, name)
    with pytest.raises(InputError, match=f"environment variable {name} is not set; start with torchrun, srun or"):
        detect(env)


@pytest.mark.parametrize(
    "name", ["SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST"]
)
def test_what_slurm_must_say(name):
    with pytest.raises(InputError, match=f"environment variable {name} is not set"):
        detect(without(SLURM, name))


@pytest.mark.parametrize(
    ("env", "name"),
    [(TORCHRUN, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")]
    + [(SLURM, name) for name in ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "MASTER_PORT")],
)
def test_numbers_are_whole(env, name):
    with pytest.raises(InputError, match=f"environment variable {name}: expected a whole number, got '4x'"):
        detect({**env, name: "4x"})


@pytest.mark.parametrize("rank", ["-1", "8", "9"])
def test_a_rank_is_one_of_the_world(rank):
    with pytest.raises(InputError, match=f"environment variable RANK: rank {rank} is not one of WORLD_SIZE 8"):
        detect({**TORCHRUN, "RANK": rank})
    with pytest.raises(InputError, match=f"SLURM_PROCID: rank {rank} is not one of SLURM_NTASKS 8"):
        detect({**SLURM, "SLURM_NTASKS": "8", "SLURM_PROCID": rank})


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("gpu[03-07,12],login1", "gpu03"),
        ("gpu[12,03-07]", "gpu12"),
        ("login1,gpu[03-07]", "login1"),
        ("node7", "node7"),
        ("a-b-[1-3]", "a-b-1"),
        ("n[001-128]-ib0", "n001-ib0"),
        ("rack[0-1]node[04-16],x", "rack0node04"),
        ("host.example.org,other", "host.example.org"),
    ],
)
def test_the_first_host(node_list, host):
    assert first_host(node_list) == host


@pytest.mark.parametrize("node_list", ["", "[", "gpu[03", "gpu]03", "gpu[]", ",a"])
def test_what_is_no_node_list(node_list):
    with pytest.raises(InputError, match="SLURM_STEP_NODELIST: can't read the node list"):
        first_host(node_list)
