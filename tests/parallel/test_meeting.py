"""A machine that waits for others says so, and one that meets them in time says nothing."""

from __future__ import annotations

import threading
import time

import pytest
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from hp_core.config.launch import LaunchConfig
from hp_core.errors import RunError
from hp_core.parallel.launching import meeting
from hp_core.parallel.launching.meeting import Meeting
from tests.contract.launches import free_port


@pytest.mark.parametrize(("nnodes", "number"), [(2, "2"), ("2:3", "2:3")])
def test_what_a_machine_waits_for_is_told_once(monkeypatch, capsys, nnodes, number):
    monkeypatch.setattr(meeting, "_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(meeting, "_JOIN_SECONDS", 2)
    endpoint = f"localhost:{free_port()}"
    alone = Meeting(LaunchConfig(nnodes=nnodes, rdzv_endpoint=endpoint, rdzv_id="alone"))
    with pytest.raises(RendezvousTimeoutError):
        alone.next_rendezvous()
    told = f"waiting at {endpoint} for {number} machines, this one among them, for 2 s at most\n"
    assert capsys.readouterr().err == told


def test_a_machine_that_hears_nothing_from_the_endpoint_says_so(monkeypatch, capsys):
    for name, seconds in (("_PATIENCE_SECONDS", 0.2), ("_ANSWER_SECONDS", 1.0), ("_CONNECT_SECONDS", 0.5)):
        monkeypatch.setattr(meeting, name, seconds)
    # An address for documentation: it is nobody's.
    with pytest.raises(RunError):
        Meeting(LaunchConfig(nnodes=2, rdzv_endpoint="192.0.2.1:29400"))
    assert capsys.readouterr().err == "waiting for 192.0.2.1:29400 to answer, for 1 s at most\n"


def test_machines_that_meet_in_time_say_nothing(monkeypatch, capsys):
    monkeypatch.setattr(meeting, "_PATIENCE_SECONDS", 30.0)
    endpoint = f"localhost:{free_port()}"
    sizes: list[int] = []
    both = threading.Barrier(2)

    def meet() -> None:
        one = Meeting(LaunchConfig(nnodes=2, rdzv_endpoint=endpoint, rdzv_id="both"))
        one.next_rendezvous()
        sizes.append(one.size)
        both.wait(timeout=60)
        one.shutdown()

    threads = [threading.Thread(target=meet) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes == [2, 2]
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
