"""What ranks keep for themselves goes on with the rank that does the same, on whatever ranks a run resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hp_core.checkpoint.layout import step_directory
from hp_core.checkpoint.places import Place, nearest, same_stream
from hp_core.checkpoint.saver import save_checkpoint
from hp_core.checkpoint.snapshot import _own_rows, require_one_piece
from hp_core.config.models import AcceleratorConfig, FsdpConfig
from hp_core.errors import RunError
from hp_core.testing.ranks import run_ranks
from hp_core.training.state import seed_everything
from tests.checkpoint.helpers import Trained, same
from tests.model.tiny import LLAMA, QWEN3_MOE, a_setup

ONE, TP2, CP2, PP2 = {}, {"tp_size": 2}, {"cp_size": 2}, {"pp_size": 2}


class Seen(torch.nn.Module):
    """A loss that has seen the tokens of a rank."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.register_buffer("tokens", torch.tensor(tokens))


def save_on(environment: Any, run: str, accelerator: dict[str, Any]) -> torch.Tensor:
    with a_setup(environment, accelerator=AcceleratorConfig(**accelerator)) as setup:
        trained = Trained(setup)
        # A loss that isn't computed has seen nothing.
        trained.loss_fn = Seen(10 + setup.token_rank if setup.has_last_stage else 0)
        state = {"tokens": setup.token_rank, "stage": setup.axis_rank("pp"), "tensor": setup.axis_rank("tp")}
        seed_everything(5, setup.random_rank)
        save_checkpoint(Path(run), trained.contents(4, plugin_state={"p": state}), setup)
        return torch.rand(3)


def load_on(environment: Any, run: str, accelerator: dict[str, Any]) -> dict[str, Any]:
    with a_setup(environment, accelerator=AcceleratorConfig(**accelerator)) as setup:
        trained = Trained(setup)
        trained.loss_fn = Seen(-1)
        restored = trained.load(step_directory(Path(run), 4))
        drawn = torch.rand(3)
        seed_everything(3, setup.random_rank, 4)
        return {
            "new": restored.new_ranks,
            "drawn": drawn,
            "anew": torch.rand(3),
            "seen": int(trained.loss_fn.tokens),
            "plugin": restored.plugin_state["p"],
        }


# By rank of the run that resumes: the rank whose random numbers it goes on with, None for none; what its loss has seen.
@pytest.mark.parametrize(
    ("before", "after", "streams", "seen"),
    [
        ((2, ONE), (2, ONE), [0, 1], [10, 11]),
        ((2, ONE), (1, ONE), [0], [10]),
        ((1, ONE), (2, ONE), [0, None], [10, 10]),
        # As many ranks that do something else: tensor ranks draw alike.
        ((2, ONE), (2, TP2), [0, 0], [10, 10]),
        ((2, TP2), (2, ONE), [0, None], [10, 10]),
        ((2, ONE), (2, CP2), [0, 1], [10, 11]),
        # The second stage computes the loss, and draws for layers of its own.
        ((2, ONE), (2, PP2), [0, None], [10, 10]),
        ((2, PP2), (2, ONE), [0, None], [10, 10]),
        ((2, PP2), (2, PP2), [0, 1], [0, 10]),
    ],
)
def test_ranks_go_on_with_what_is_theirs(tmp_path, before, after, streams, seen):
    drawn = run_ranks(save_on, before[0], str(tmp_path), before[1])
    results = run_ranks(load_on, after[0], str(tmp_path), after[1])
    new = tuple(rank for rank, stream in enumerate(streams) if stream is None)
    for rank, (result, stream) in enumerate(zip(results, streams, strict=True)):
        assert result["new"] == new
        wanted = result["anew"] if stream is None else drawn[stream]
        assert torch.equal(result["drawn"], wanted), rank
    assert [result["seen"] for result in results] == seen
    if before == after:
        assert [result["plugin"]["tokens"] for result in results] == [0, 1] if before[1] != PP2 else [0, 0]
    others = [str(one["drawn"].tolist()) for one in results]
    assert len(set(others)) == (1 if after[1] == TP2 else len(others))


def place(stage: int = 0, tokens: int = 0, tensor: int = 0, *, has_loss: bool = True) -> Place:
    return Place(stage, tokens, tensor, has_loss)


def test_the_stream_is_that_of_the_same_layers_and_tokens():
    saved = [place(stage, tokens, tensor) for stage in (0, 1) for tokens in (0, 1) for tensor in (0, 1)]
    for rank, one in enumerate(saved):
        assert same_stream(one, saved) == rank
    assert same_stream(place(1, 1, 3), saved) == 6
    assert same_stream(place(2, 0), saved) is None
    assert same_stream(place(0, 2), saved) is None
    assert same_stream(place(), []) is None


def test_the_nearest_computes_the_loss_on_the_same_tokens():
    saved = [place(0, 0, has_loss=False), place(0, 1, has_loss=False), place(1, 0), place(1, 1)]
    assert [nearest(one, saved) for one in saved] == [0, 1, 2, 3]
    assert nearest(place(0, 1), saved) == 3
    assert nearest(place(0, 7), saved) == 2
    assert nearest(place(2, 1, has_loss=False), saved) == 1
    assert nearest(place(1, 0, has_loss=False), [place(0, 0), place(0, 1)]) == 0


# Parts that are one piece of the whole.

LAYOUTS = {
    "fsdp x tp": (LLAMA, {"tp_size": 2}, {}),
    "uneven shards of shards": ({**LLAMA, "intermediate_size": 50}, {"tp_size": 2}, {}),
    "experts": (QWEN3_MOE, {"tp_size": 2, "ep_size": 2}, {}),
    "hsdp x tp": (LLAMA, {"tp_size": 2}, {"dp_replicate_size": 2}),
}


def save_strided(environment: Any, run: str, name: str) -> tuple[int, dict[str, torch.Tensor]]:
    config, accelerator, fsdp = LAYOUTS[name]
    sections = {"accelerator": AcceleratorConfig(**accelerator), "fsdp": FsdpConfig(**fsdp)}
    with a_setup(environment, **sections) as setup:
        trained = Trained(setup, config)
        strided = 0
        for parameter in trained.model.parameters():
            assert isinstance(parameter, DTensor)
            strided += any(isinstance(one, _StridedShard) for one in parameter.placements)
            # What is said to be here is what is here.
            whole = parameter.full_tensor()
            for dim, rows in _own_rows(parameter).items():
                whole = whole.index_select(dim, rows)
            assert torch.equal(parameter.to_local(), whole)
        save_checkpoint(Path(run), trained.contents(), setup)
        return strided, trained.tensors()


@pytest.mark.parametrize("name", LAYOUTS)
def test_where_two_axes_share_a_dimension_the_parts_are_pieces_and_load_anywhere(tmp_path, name):
    strided, tensors = run_ranks(save_strided, 4, str(tmp_path), name)[0]
    assert strided >= (4 if name != "hsdp x tp" else 0)
    with a_setup() as setup:
        again = Trained(setup, LAYOUTS[name][0], steps=2)
        again.load(step_directory(tmp_path, 1))
        assert same(again.tensors(), tensors)


def packed(environment: Any) -> list[str]:
    with a_setup(environment, accelerator=AcceleratorConfig(tp_size=2)) as setup:
        mesh = setup.mesh["tp"]
        own = torch.zeros(4, 3)
        told = []
        for placement in (Shard(0), _StridedShard(0, split_factor=1), _StridedShard(0, split_factor=2)):
            tensor = DTensor.from_local(own, mesh, [placement], run_check=False)
            try:
                require_one_piece("model/gate_up", tensor)
                told.append("")
            except RunError as error:
                told.append(str(error))
        return told


def test_packed_projections_are_refused():
    # Gate and up in one matrix, a half of each on either rank: torch saves them as if they were the first four rows.
    for told in run_ranks(packed, 2):
        assert told[:2] == ["", ""]
        assert "model/gate_up: this rank's part along dimension 0 is not one piece of the whole" in told[2]
