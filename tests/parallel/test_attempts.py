"""What attempts of a run tell each other through a store that several runs may share."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from hp_core.config import load_recipe
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.setup import distributed
from tests.e2e.runs import recipe


def test_runs_that_meet_at_one_endpoint_don_t_hear_of_each_other(tmp_path):
    config = load_recipe(str(recipe(tmp_path)), []).config
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))

    def heard(run_id: str, attempt: int, says: str | None = None) -> str | None:
        place = ("torchrun", 0, 1, 0, "127.0.0.1", store.port, True)
        with distributed(ProcessEnvironment(*place, attempt=attempt, run_id=run_id), config) as setup:
            if says is not None:
                setup.attempts.remember("run_directory", says)
            return setup.attempts.recall("run_directory")

    assert heard("one", 0, "runs/one") is None
    assert heard("another", 1) is None
    assert heard("another", 0, "runs/another") is None
    assert [heard(name, 1) for name in ("one", "another")] == ["runs/one", "runs/another"]
