"""What a plan tells of all axes: exchanges counted by hand, the text, and the JSON of a run."""

from __future__ import annotations

import json

import pytest

from hp_core.cli.main import main
from hp_core.config.models import AcceleratorConfig, FsdpConfig, MixedPrecisionConfig
from hp_core.parallel.plan.exchange import Settings
from hp_core.parallel.plan.model_plan import plan_model
from hp_core.parallel.sizes import ParallelSizes
from tests.e2e.runs import recipe
from tests.parallel.test_plan_contract import skeleton

# Of tiny llama: projections of 32 x 32 and 16 x 32, three of the MLP and two norms; embedding, head and the last norm.
LAYER = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32
REST = 2 * 96 * 32 + 32


def sent(plan, axis):
    return {
        (one.fqn, one.collective, one.direction): (one.size_bytes, one.per)
        for one in plan.exchanges
        if one.axis == axis
    }


@pytest.mark.parametrize(
    ("method", "forward", "backward"),
    # Two heads of keys and values and four of queries and outputs, each of 8 floats.
    [("all_gather", 2 * 2 * 8 * 4, 2 * 2 * 8 * 4), ("ring", 2 * 2 * 8 * 4, 4 * 2 * 8 * 4), ("ulysses", 384, 384)],
)
def test_context_ranks_send_keys_and_values(method, forward, backward):
    settings = Settings(AcceleratorConfig(cp_size=2, cp_method=method))
    found = sent(plan_model(skeleton("qwen3"), ParallelSizes(cp=2), settings=settings), "cp")
    sizes = {(fqn, direction): size for (fqn, _, direction), size in found.items()}
    assert sizes == {
        (f"model.layers.{layer}.self_attn", direction): (size, "token")
        for layer in range(2)
        for direction, size in (("forward", forward), ("backward", backward))
    }


def test_expert_ranks_send_each_token_to_two_experts_and_back():
    found = sent(plan_model(skeleton("qwen3_moe"), ParallelSizes(dp_shard=2, ep=2)), "ep")
    assert set(found.values()) == {(2 * 2 * 32 * 4, "token")}
    assert len(found) == 2 * 2


def test_fsdp_gathers_each_layer_twice_and_the_rest_once():
    found = sent(plan_model(skeleton(), ParallelSizes(dp_shard=4)), "fsdp")
    layer = {
        ("all_gather", "forward"): (LAYER * 4, "pass"),
        ("all_gather", "backward"): (LAYER * 4, "pass"),
        ("reduce_scatter", "backward"): (LAYER * 4, "pass"),
    }
    rest = {("all_gather", "forward"): (REST * 4, "pass"), ("reduce_scatter", "backward"): (REST * 4, "pass")}
    wanted = {"": rest, "model.layers.0": layer, "model.layers.1": layer}
    assert found == {(fqn, *key): size for fqn, own in wanted.items() for key, size in own.items()}


def test_what_is_kept_gathered_or_computed_in_half_precision_is_less():
    settings = Settings(
        AcceleratorConfig(), FsdpConfig(reshard_after_forward=False), MixedPrecisionConfig(param_dtype="bfloat16")
    )
    found = sent(plan_model(skeleton(), ParallelSizes(dp_shard=4), settings=settings), "fsdp")
    assert ("model.layers.0", "all_gather", "backward") not in found
    assert found["model.layers.0", "all_gather", "forward"] == (LAYER * 2, "pass")
    assert found["model.layers.0", "reduce_scatter", "backward"] == (LAYER * 4, "pass")


def test_copies_sum_their_own_parts():
    found = sent(plan_model(skeleton(), ParallelSizes(dp_replicate=2, dp_shard=2)), "dp_replicate")
    assert found["model.layers.1", "all_reduce", "backward"] == (LAYER // 2 * 4, "pass")


@pytest.mark.parametrize(
    "sizes",
    [ParallelSizes(dp_shard=5), ParallelSizes(dp_replicate=2, dp_shard=3, tp=2), ParallelSizes(dp_shard=6, ep=2)],
)
def test_what_each_rank_holds_is_the_sum_of_its_parts(sizes):
    plan = plan_model(skeleton("qwen3_moe", moe_intermediate_size=48, hidden_size=96), sizes)
    assert list(plan.layout.by_rank) == [plan.local_parameters(rank) for rank in range(sizes.world)]
    runs = plan.as_dict()["local_parameters"]
    assert sum((run["last_rank"] - run["first_rank"] + 1) * run["parameters"] for run in runs) == sum(
        plan.layout.by_rank
    )


def test_explain_tells_of_every_axis():
    plan = plan_model(skeleton("qwen3_moe"), ParallelSizes(dp_shard=2, cp=2, tp=1, ep=2))
    lines = plan.explain().splitlines()
    assert lines[0].startswith("plan: dp_shard 2 x cp 2 x ep 2: a rank holds ")
    assert "cp: model.layers.*.self_attn, 2 times: all_gather in forward, 128 bytes a token" in lines
    assert "ep: model.layers.*.mlp.experts, 2 times: all_to_all there and back in forward, 512 bytes a token" in lines
    assert plan.explain("model.layers.1.self_attn").splitlines() == [
        "cp: model.layers.1.self_attn: all_gather in forward, 128 bytes a token",
        "cp: model.layers.1.self_attn: reduce_scatter in backward, 128 bytes a token",
    ]
    with pytest.raises(KeyError, match=r"no boundary .model\.layers\.9"):
        plan.explain("model.layers.9")


def test_the_json_of_a_plan_holds_its_placements_and_edges():
    plan = plan_model(skeleton(), ParallelSizes(dp_shard=2, tp=2))
    told = json.loads(json.dumps(plan.as_dict()))
    assert told["sizes"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2, "ep": 1}
    by_name = {one["name"]: one for one in told["parameters"]}
    assert by_name["model.layers.0.mlp.down_proj.weight"]["placements"] == {"tp": "shard(1)", "fsdp": "shard(0)"}
    (mlp,) = [one for one in told["boundaries"] if one["name"] == "model.layers.0.mlp"]
    assert [(edge["side"], edge["src"], edge["dst"]) for edge in mlp["edges"]] == [
        ("input", "replicate", "replicate"),
        ("output", "partial", "replicate"),
    ]
    (done,) = mlp["edges"][1]["collectives"]
    assert done == {"name": "all_reduce", "direction": "forward", "bytes_per_token": 128}


def test_a_pipeline_rank_holds_its_layers_and_its_end():
    settings = Settings(AcceleratorConfig(pp_size=2))
    plan = plan_model(skeleton(), ParallelSizes(pp=2), settings=settings)
    assert [(one.pp_rank, one.first_layer, one.last_layer) for one in plan.stages] == [(0, 0, 0), (1, 1, 1)]
    assert [plan.local_parameters(rank) for rank in range(2)] == [LAYER + 96 * 32, LAYER + 96 * 32 + 32]
    assert "pp: stage 1 on rank 1: layers 1 to 1" in plan.explain().splitlines()
    tied = plan_model(skeleton("llama_tied"), ParallelSizes(pp=2), settings=settings)
    assert [tied.local_parameters(rank) for rank in range(2)] == [LAYER + 96 * 32, LAYER + 96 * 32 + 32]
    assert list(tied.layout.by_rank) == [tied.local_parameters(rank) for rank in range(2)]


def test_a_run_tells_what_becomes_of_its_activations(tmp_path, capsys):
    features = ["--activation_checkpoint.mode=every_n", "--activation_checkpoint.n=2", "--activation_swap.mode=host"]
    path = recipe(tmp_path)
    assert main([str(path), *features]) == 0
    said = capsys.readouterr().out
    assert "activations: those of model.layers.1 are computed again (every_n)" in said
    assert "activations: those of 2 modules are kept on the host" in said
    layers = ["model.layers.0", "model.layers.1"]
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["activations"] == {"mode": "every_n", "recomputed": layers[1:], "swapped": layers}
