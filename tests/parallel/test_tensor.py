"""A model on tensor ranks: its weights from the seed and from files, what it is made of, and what is refused."""

from __future__ import annotations

import re

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from hp_core.config.models import AcceleratorConfig
from hp_core.errors import InputError, RunError
from hp_core.model.export import export_model
from hp_core.parallel.plan.edge import REPLICATE, Edge, shard
from hp_core.parallel.tensor.apply import require_shared
from hp_core.parallel.tensor.region import SharedForward
from hp_core.testing.ranks import run_ranks
from tests.model.test_build import CountingFile, digests
from tests.model.tiny import FAMILIES, LLAMA, a_setup, build

TP2 = AcceleratorConfig(tp_size=2)


def digests_on_ranks(environment, config, pretrained=None):
    with a_setup(environment, accelerator=TP2) as setup:
        return digests(build(setup, config, pretrained=pretrained))


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_initial_weights_are_those_of_one_process_to_the_last_bit(family):
    with a_setup() as setup:
        alone = digests(build(setup, FAMILIES[family]))
    assert run_ranks(digests_on_ranks, 4, FAMILIES[family]) == [alone] * 4


@pytest.mark.parametrize("changes", [{"intermediate_size": 50}, {"vocab_size": 97, "tie_word_embeddings": True}])
def test_shards_of_shards_that_do_not_divide_are_in_place_too(changes):
    """Of 2 x 25 features FSDP gives one rank 13 and one 12; of 97 tokens the second tensor rank has 48."""
    config = {**LLAMA, **changes}
    with a_setup() as setup:
        alone = digests(build(setup, config))
    assert run_ranks(digests_on_ranks, 4, config) == [alone] * 4


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen3_moe", "deepseek_v3"])
def test_the_weights_of_a_directory_are_loaded_to_the_last_bit(tmp_path, family):
    with a_setup() as setup:
        model = build(setup, {**FAMILIES[family], "vocab_size": 97})
        alone = digests(model)
        export_model(model, tmp_path)
    for num_ranks in (2, 4):
        assert run_ranks(digests_on_ranks, num_ranks, {}, str(tmp_path)) == [alone] * num_ranks


def bytes_read(environment, pretrained):
    from transformers import modeling_utils

    modeling_utils.safe_open = CountingFile
    with a_setup(environment, accelerator=TP2) as setup:
        model = build(setup, pretrained=pretrained)
        return CountingFile.read, sum(one.to_local().nbytes for one in model.parameters())


def test_a_rank_reads_its_own_parts_alone(tmp_path):
    with a_setup() as setup:
        export_model(build(setup, LLAMA), tmp_path)
    for num_ranks in (2, 4):
        for read, own in run_ranks(bytes_read, num_ranks, str(tmp_path)):
            assert read == own


def export_on_ranks(environment, config, directory):
    with a_setup(environment, accelerator=TP2) as setup:
        export_model(build(setup, config), directory)


def test_export_writes_whole_weights(tmp_path):
    config = {**LLAMA, "vocab_size": 97}
    run_ranks(export_on_ranks, 2, config, str(tmp_path / "two"))
    with a_setup() as setup:
        export_model(build(setup, config), tmp_path / "one")
    assert (tmp_path / "two" / "model.safetensors").read_bytes() == (
        tmp_path / "one" / "model.safetensors"
    ).read_bytes()


def layout_on_ranks(environment, config):
    with a_setup(environment, accelerator=TP2) as setup:
        model = build(setup, config)
        return {
            name: (
                one.placements[-1] if isinstance(one, DTensor) and one.device_mesh.ndim == 2 else None,
                one.to_local().numel(),
            )
            for name, one in model.named_parameters()
        }


def test_a_rank_holds_its_own_heads_alone():
    layouts = run_ranks(layout_on_ranks, 2, FAMILIES["qwen3"])
    for layout in layouts:
        attention = {
            name.rpartition("self_attn.")[2]: value for name, value in layout.items() if ".0.self_attn" in name
        }
        assert attention == {
            "q_proj.weight": (Shard(0), 32 * 32 // 2),
            "k_proj.weight": (Shard(0), 16 * 32 // 2),
            "v_proj.weight": (Shard(0), 16 * 32 // 2),
            "o_proj.weight": (Shard(1), 32 * 32 // 2),
            "q_norm.weight": (Replicate(), 8),
            "k_norm.weight": (Replicate(), 8),
        }
        assert layout["lm_head.weight"] == (Shard(0), 96 * 32 // 2)


def refused_on_ranks(environment):
    with a_setup(environment, accelerator=TP2) as setup:
        try:
            require_shared(torch.nn.Linear(2, 2), setup)
        except InputError as error:
            return str(error)
        return None


def test_a_model_that_nobody_shared_is_refused():
    for found in run_ranks(refused_on_ranks, 2):
        assert re.search("no layer of Linear is shared among the tensor ranks; a model builder finishes", found)
    with a_setup() as setup:
        require_shared(torch.nn.Linear(2, 2), setup)


class Dropping(torch.nn.Module):
    """Shows the random numbers that an attention would drop its weights by."""

    attention_dropout = 0.5

    def forward(self, hidden_states):
        return torch.rand(3)


def drops_on_ranks(environment):
    with a_setup(environment, accelerator=TP2) as setup:
        torch.manual_seed(setup.token_rank)
        module = Dropping()
        module.forward = SharedForward(module, [], [], setup.mesh["tp"].get_group())
        hidden = torch.zeros(1)
        trained = [module(hidden).tolist() for _ in range(2)]
        return trained, torch.rand(3).tolist(), module.eval()(hidden).tolist()


def test_heads_drop_by_their_own_numbers_and_everything_else_by_common_ones():
    first, second = run_ranks(drops_on_ranks, 2)
    numbers = [*first[0], *second[0]]
    assert len({tuple(one) for one in numbers}) == 4
    assert first[1:] == second[1:]


class Rotating(torch.nn.Module):
    def forward(self, hidden, positions):
        return hidden * positions[0] + positions[1]


def gradients_on_ranks(environment):
    """Of learnt numbers in a tuple, of which each rank has a share of the gradient."""
    with a_setup(environment, accelerator=TP2) as setup:
        group = setup.mesh.get_group("tp")
        learnt, fixed = torch.ones(2, requires_grad=True), torch.ones(2)
        shared = SharedForward(Rotating(), (), (), group)
        shared(torch.full((2,), 1.0 + setup.rank), (learnt, fixed)).sum().backward()
        placed = SharedForward(Rotating(), (), (Edge("positions", REPLICATE, shard(1), 2, 4),), group)
        with pytest.raises(RunError, match="Rotating takes a tuple as 'positions', and only a tensor can be placed"):
            placed(fixed, (fixed, fixed))
        return learnt.grad.tolist()


def test_learnt_tensors_in_a_tuple_cross_and_others_can_not_be_placed():
    assert run_ranks(gradients_on_ranks, 2) == [[3.0, 3.0]] * 2


def counts_on_ranks(environment):
    with a_setup(environment, accelerator=TP2) as setup:
        rank = setup.rank
        (summed,) = setup.sum_tensors([torch.tensor([1.0 + rank, 10.0])])
        return setup.sum_on_host([1, 10**rank]), setup.gather_on_host([float(rank)]), summed.tolist(), setup.token_rank


def test_tensor_ranks_count_once():
    """Ranks 0 and 1 read the same rows, and so do 2 and 3."""
    found = run_ranks(counts_on_ranks, 4)
    for sums, rows, summed, _ in found:
        assert sums == [2, 1 + 100]
        assert rows == [[0.0], [2.0]]
        assert summed == [1.0 + 3.0, 20.0]
    assert [token_rank for *_, token_rank in found] == [0, 0, 1, 1]
