"""Sharding contracts: what they change in a plan, every way to get one wrong, and that losses and gradients stay."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hp_core.config.plan_override import AxisPlacements, PlanOverride
from hp_core.errors import InputError
from hp_core.parallel.plan.contract import contracts_of
from hp_core.parallel.plan.derive import derive_plan
from hp_core.parallel.plan.model_plan import plan_model
from hp_core.parallel.sizes import ParallelSizes
from tests.equivalence.layouts import Case, Found, Layout, assert_same, found_on
from tests.model.tiny import FAMILIES

TP2 = ParallelSizes(tp=2)


def entry(match="*.mlp", **written):
    """An entry as the recipe's reader makes it, from placements by axis."""
    fields = {
        name: {key: AxisPlacements(**one) for key, one in value.items()}
        if name in ("params", "in_src", "in_dst")
        else AxisPlacements(**value)
        if name in ("out_src", "out_dst")
        else value
        for name, value in written.items()
    }
    return PlanOverride(match=match, **fields)


def skeleton(family="llama", **values):
    config = {**FAMILIES[family], **values}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))


def planned(*overrides, model=None, tp_size=2):
    model = model if model is not None else skeleton()
    return derive_plan(model, tp_size, contracts_of(model, overrides, ParallelSizes(tp=tp_size)))


def boundary(plan, fqn):
    return next(one for one in plan.boundaries if one.fqn == fqn)


def refused(*overrides, **values):
    with pytest.raises(InputError) as caught:
        planned(*overrides, **values)
    return [str(problem) for problem in caught.value.problems]


ATTENTION_PARAMS = {
    f"{name}_proj.weight": {"tp": f"shard({dim})"} for name, dim in (("q", 0), ("k", 0), ("v", 0), ("o", 1))
}
CUT_HEAD = entry("lm_head", params={"weight": {"tp": "shard(0)"}})
ROWS = entry("lm_head", params={"weight": {"tp": "shard(1)"}})
WHOLE = entry("*.self_attn", params={})


def test_an_attention_that_is_kept_whole():
    plan = planned(entry("*.0.self_attn", params={}))
    kept = boundary(plan, "model.layers.0.self_attn")
    assert (kept.kind, kept.note, kept.edges) == ("replicated", "kept whole by plan_overrides[0]", ())
    assert boundary(plan, "model.layers.0.self_attn.q_proj").parameters[0].shard_dim is None
    assert boundary(plan, "model.layers.1.self_attn").kind == "attention"
    # Of four regions three are left, with an all-reduce of 32 floats in either direction each; embedding, head, logits.
    assert plan.bytes_per_token == (3 * 2 * 32 + 2 * 32 + 96) * 4


def test_a_head_that_is_kept_whole():
    plan = planned(entry("lm_head", params={}))
    kept = boundary(plan, "lm_head")
    assert (kept.kind, kept.edges, kept.parameters[0].shard_dim) == ("replicated", (), None)
    assert boundary(plan, "model.embed_tokens").kind == "embedding"


def test_a_head_that_is_tied_to_an_embedding_that_is_kept_whole():
    plan = planned(entry("model.embed_tokens", params={}), model=skeleton("llama_tied"))
    assert boundary(plan, "model.embed_tokens").kind == boundary(plan, "lm_head").kind == "replicated"
    assert boundary(plan, "lm_head").note.startswith("its weight is that of an embedding that is whole: it is left to")


def test_heads_that_can_not_be_shared_may_be_kept_whole():
    model = skeleton("qwen3", num_attention_heads=3, num_key_value_heads=3)
    assert "3 attention heads can't be shared by 2 ranks" in refused(model=model)[0]
    assert [one.kind for one in planned(WHOLE, model=model).shared] == ["embedding", "mlp", "mlp", "head"]


def test_a_linear_module_that_is_cut_by_columns_or_rows():
    """What its weight says of its edges: the head gathers 96 logits, or adds up those of halves of the features."""
    columns = boundary(planned(CUT_HEAD), "lm_head")
    assert [(one.name, one.shard_dim, one.partial) for one in columns.parameters] == [("weight", 0, False)]
    assert [str(edge) for edge in columns.edges] == [
        "input: replicate -> replicate: all_reduce in backward, 384 bytes a token",
        "shard(-1) -> replicate: all_gather in forward, 384 bytes a token",
    ]
    rows = boundary(planned(ROWS), "lm_head")
    assert [(one.name, one.shard_dim) for one in rows.parameters] == [("weight", 1)]
    assert (rows.inputs[0].dst, rows.output.src, rows.output.dst, rows.row) == (
        columns.output.src,
        rows.output.src,
        columns.output.dst,
        "",
    )
    assert str(rows.output.src) == "partial"


def test_what_is_derived_may_be_written():
    derived = planned()
    written = entry(
        params={f"{name}_proj.weight": {"tp": f"shard({dim})"} for name, dim in (("gate", 0), ("up", 0), ("down", 1))}
    )
    before, after = (boundary(one, "model.layers.1.mlp") for one in (derived, planned(written)))
    assert after.parameters == before.parameters
    assert [str(edge) for edge in after.edges] == [str(edge) for edge in before.edges]


def test_axes_of_size_1_change_nothing():
    model = skeleton()
    assert plan_model(model, ParallelSizes(dp_shard=2), [CUT_HEAD]) == plan_model(model, ParallelSizes(dp_shard=2))


@pytest.mark.parametrize(
    "override",
    [
        entry("*.mlp", params={"up_proj.weight": {"ep": "replicate"}}),
        entry("*.mlp", in_src={"x": {"cp": "shard(1)"}}, in_dst={"x": {"cp": "shard(1)"}}),
        entry("*.self_attn", out_src={"cp": "shard(1)"}, out_dst={"cp": "shard(1)"}),
        entry("lm_head", out_src={"cp": "shard(1)"}),
        entry("model.embed_tokens", params={"weight": {"cp": "replicate"}}),
    ],
)
def test_an_axis_that_nobody_wrote_stays_as_derived(override):
    assert planned(override) == planned()


def test_experts_of_which_only_the_tensor_axis_is_written_stay_spread():
    model, sizes = skeleton("qwen3_moe"), ParallelSizes(dp_shard=2, ep=2)
    written = entry("*.experts", params={"down_proj": {"tp": "replicate"}})
    assert plan_model(model, sizes, [written]) == plan_model(model, sizes)


def test_experts_that_are_kept_whole():
    model = skeleton("qwen3_moe")
    sizes = ParallelSizes(dp_shard=2, ep=2)
    derived = plan_model(model, sizes)
    by_expert = {name: {"ep": "shard(0)"} for name in ("gate_up_proj", "down_proj")}
    assert plan_model(model, sizes, [entry("*.experts", params=by_expert)]) == derived
    kept = plan_model(model, sizes, [entry("*.0.mlp.experts", params={})])
    assert (derived.experts, kept.experts) == (
        ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts"),
        ("model.layers.1.mlp.experts",),
    )
    with pytest.raises(InputError, match=r"plan_overrides\[0\].params: .*: experts are spread whole, by shard\(0\)"):
        plan_model(model, sizes, [entry("*.experts", params={"down_proj": {"ep": "shard(0)"}})])


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        ([entry("*.mpl", params={})], ["plan_overrides[0].match: '*.mpl' matches no module; did you mean '*.mlp'?"]),
        (
            [entry(["*.mlp", "*.norm"], params={})],
            ["plan_overrides[0].match: matches modules of 2 types: LlamaMLP (model.layers.0.mlp), LlamaRMSNorm "],
        ),
        (
            [entry(module_type="torch.nn.Linear", params={})],
            ["plan_overrides[0].module_type: 2 of the 2 modules that match are no Linear"],
        ),
        ([entry(params={}), entry("*.1.mlp", params={})], ["plan_overrides[1].match: model.layers.1.mlp: claimed by "]),
        (
            [entry(params={"up.weight": {"tp": "shard(0)"}})],
            ["plan_overrides[0].params.up.weight: model.layers.0.mlp (and 1 more): LlamaMLP has no parameter "],
        ),
        (
            [entry("*.1.mlp", in_src={"hidden": {"tp": "shard(1)"}})],
            ["plan_overrides[0].in_src.hidden: model.layers.1.mlp: the forward of LlamaMLP takes no 'hidden'; "],
        ),
        (
            [entry("*.0.mlp.up_proj", params={"weight": {"tp": "shard(0)"}})],
            ["plan_overrides[0].match: model.layers.0.mlp.up_proj: is a part of model.layers.0.mlp, which is planned"],
        ),
        (
            [entry("model.layers.0", out_src={"tp": "shard(1)"})],
            ["plan_overrides[0].match: model.layers.0: holds model.layers.0.self_attn, which is planned as one"],
        ),
        (
            [entry("lm_head", params={"weight": {"tp": "shard(2)"}})],
            ["plan_overrides[0].params.weight: lm_head: weight has 2 dimensions, and none is 2"],
        ),
        (
            [entry("lm_head", params={"weight": {"tp": "partial"}})],
            ["plan_overrides[0].params.weight.tp: lm_head: a parameter is no summand; write replicate or shard(N)"],
        ),
        (
            [entry("model.norm", params={"weight": {"tp": "shard(0)"}})],
            ["plan_overrides[0].out_src: model.norm: its parameters are cut, and nothing says how its output lies"],
        ),
        (
            [entry("lm_head", params={"weight": {"tp": "shard(0)"}}, out_dst={"tp": "partial"})],
            ["plan_overrides[0].out_dst: lm_head: nothing makes partial of shard(-1); write out_dst: {tp: replicate}"],
        ),
        (
            [entry("lm_head", params={"weight": {"tp": "shard(0)"}}, out_dst={"tp": "shard(-1)"})],
            ["plan_overrides[0].out_dst: lm_head: out_dst is shard(-1), and no module beside it takes that"],
        ),
        (
            [entry("model.norm", out_src={"tp": "partial"})],
            ["plan_overrides[0].out_src: model.norm: its output is partial, and neither a parameter nor an input"],
        ),
        (
            [entry("model.norm", in_dst={"hidden_states": {"tp": "shard(1)"}})],
            ["plan_overrides[0].out_src: model.norm: its inputs are cut, and nothing says how its output lies; write "],
        ),
        (
            [entry("model.norm", out_dst={"tp": "shard(1)"})],
            ["plan_overrides[0].out_dst: model.norm: out_dst is shard(1), and no module beside it takes that"],
        ),
        (
            [entry("lm_head", params={"weight": {}})],
            ["plan_overrides[0].params.weight: lm_head: nothing is written of it; write {tp: replicate}, or remove it"],
        ),
        (
            [entry("model.embed_tokens", params={"weight": {"tp": "shard(0)"}}, out_src={"tp": "partial"})],
            ["plan_overrides[0].params.weight: model.embed_tokens: a rank would miss rows of weight; remove the entry"],
        ),
        (
            [entry("*.mlp", params={"up_proj.weight": {"tp": "shard(0)"}, "down_proj.weight": {"tp": "shard(1)"}})],
            ["plan_overrides[0].params: model.layers.0.mlp (and 1 more): up_proj is cut, and gate_proj is not so "],
        ),
        (
            [entry("*.0.self_attn", params=ATTENTION_PARAMS | {"k_proj.weight": {"tp": "replicate"}})],
            ["plan_overrides[0].params: model.layers.0.self_attn: q_proj is cut, and k_proj is not so that it fits; "],
        ),
        (
            [entry("*.1.mlp", in_src={"x": {"tp": "shard(1)"}}, out_dst={"tp": "shard(1)"})],
            [
                "plan_overrides[0].out_dst: model.layers.1.mlp: out_dst is shard(1), and no module beside it takes",
                "plan_overrides[0].in_src: model.layers.1.mlp: in_src is shard(1), and no module beside it gives that",
            ],
        ),
        (
            [entry("*.1.mlp", in_src={"x": {"cp": "replicate"}})],
            ["plan_overrides[0].in_src.x.cp: model.layers.1.mlp: what lies on the ranks of cp can't be 'replicate'"],
        ),
    ],
)
def test_what_is_refused(overrides, lines):
    found = refused(*overrides)
    assert len(found) == len(lines)
    for line, wanted in zip(found, lines, strict=True):
        assert line.startswith(wanted), line


def test_entries_that_are_not_active_are_checked_as_well():
    model = skeleton()
    with pytest.raises(InputError, match="LlamaMLP has no parameter 'up'"):
        plan_model(model, ParallelSizes(), [entry(when="tp", params={"up": {}})])
    assert (
        plan_model(model, ParallelSizes(), [entry(when="tp", params={}), entry(when="cp", params={})]).tensors is None
    )


def test_sizes_that_do_not_divide_are_told_with_those_that_would():
    (line,) = refused(CUT_HEAD, model=skeleton(vocab_size=97))
    assert line == (
        "plan_overrides[0].params.weight: lm_head: 97 of weight can't be shared by 2 ranks; tp_size that would: 1"
    )


def test_fewer_heads_than_ranks_are_not_cut_by_hand():
    model = skeleton(num_key_value_heads=1)
    k_proj, v_proj = refused(entry("*.0.self_attn", params=ATTENTION_PARAMS), model=model)
    assert k_proj == (
        "plan_overrides[0].params: model.layers.0.self_attn: k_proj.weight has fewer heads than there are ranks; "
        "remove params: the planner has ranks share them"
    )
    assert "v_proj.weight has fewer heads" in v_proj


@pytest.mark.parametrize(("match", "other"), [("model.embed_tokens", "lm_head"), ("lm_head", "model.embed_tokens")])
def test_a_weight_that_another_module_has_too_is_not_cut_alone(match, other):
    written = entry(match, params={"weight": {"tp": "shard(1)"}}, out_src={"tp": "shard(-1)"})
    found = refused(written, model=skeleton("llama_tied"))
    assert any("weight is tied to " in line for line in found)
    assert other in found[0] or "another module" in found[0]


def test_a_bias_is_cut_with_its_weight():
    model = skeleton()
    model.lm_head = nn.Linear(32, 96, device="meta")
    assert refused(CUT_HEAD, model=model) == [
        "plan_overrides[0].params: lm_head: the weight of it is cut and its bias is not; write bias: {tp: shard(0)}"
    ]


LAYOUT = Layout(2, {"tp_size": 2})


@cache
def alone() -> Found:
    return found_on(Case(), Layout())


TOKENS = {"tp": "shard(1)"}
CHAIN = (
    entry("*.pre_feedforward_layernorm", out_dst=TOKENS),
    entry("*.mlp", in_src={"x": TOKENS}, out_dst={"tp": "shard(-2)"}),
    entry("*.post_feedforward_layernorm", in_src={"x": TOKENS}, in_dst={"x": TOKENS}, out_src=TOKENS),
)
FEATURES = entry("model.embed_tokens", params={"weight": {"tp": "shard(1)"}}, out_src={"tp": "shard(-1)"})


@pytest.mark.parametrize(
    "overrides", [(WHOLE,), (CUT_HEAD,), (ROWS,), (FEATURES,)], ids=["whole", "columns", "rows", "features"]
)
def test_a_step_under_a_contract_is_that_of_one_process(overrides):
    assert_same(found_on(Case(overrides=overrides), LAYOUT), alone())


def test_neighbours_may_keep_sequences_cut_that_do_not_divide():
    case = {"config": {"model_type": "gemma3_text"}, "length": 15}
    assert_same(found_on(Case(**case, overrides=CHAIN), LAYOUT), found_on(Case(**case), Layout()))
