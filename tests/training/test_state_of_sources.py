from __future__ import annotations

import json

from hp_core.data.order import Position
from hp_core.training.feeding import source_metrics
from hp_core.training.state import RunState


def test_counts_of_sources_and_cursors_are_part_of_a_checkpoint() -> None:
    state = RunState(3, source_rows={"web": 4}, source_targets={"web": 28}, cursors=[[0, 4, 2, 0, 6]])
    again = RunState.from_dict(json.loads(json.dumps(state.as_dict())))
    assert again == state
    assert source_metrics(again) == {"rows/web": 4, "targets/web": 28}


def test_a_checkpoint_from_before_there_were_any_is_read() -> None:
    values = RunState(step=3, position=Position(12, 0, 12)).as_dict()
    for name in ("source_rows", "source_targets", "cursors"):
        del values[name]
    assert RunState.from_dict(values) == RunState(step=3, position=Position(12, 0, 12))
