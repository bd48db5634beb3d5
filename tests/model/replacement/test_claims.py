"""What the rules select, and everything that is wrong with a selection, told at once."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from hp_core.errors import InputError
from tests.model.replacement.factories import ClassNorm, Norm
from tests.model.replacement.rules import LLAMA, apply, rule, skeleton
from tests.model.tiny import DEEPSEEK_V3, QWEN3_MOE
from tests.model.tiny import LLAMA as LLAMA_CONFIG

NORM = f"{LLAMA}.LlamaRMSNorm"


def problems(config: dict, *rules: object) -> list[str]:
    model = skeleton(config)
    before = [(name, id(module)) for name, module in model.named_modules()]
    with pytest.raises(InputError) as caught:
        apply(model, *rules)
    assert [(name, id(module)) for name, module in model.named_modules()] == before
    return [str(problem) for problem in caught.value.problems]


def test_every_match_is_replaced_and_nothing_else() -> None:
    model = skeleton(LLAMA_CONFIG)
    replaced = apply(model, rule("*layernorm", "norm", module_type=NORM))
    assert sorted(one.fqns[0] for one in replaced) == [
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
        "model.layers.1.input_layernorm",
        "model.layers.1.post_attention_layernorm",
    ]
    assert type(model.model.layers[1].input_layernorm) is Norm
    assert type(model.model.norm).__name__ == "LlamaRMSNorm"


def test_a_class_can_be_the_factory() -> None:
    model = skeleton(LLAMA_CONFIG)
    apply(model, rule("model.norm", "ClassNorm"))
    assert type(model.model.norm) is ClassNorm


def test_a_star_crosses_dots_and_a_pattern_is_the_whole_name() -> None:
    assert len(apply(skeleton(LLAMA_CONFIG), rule("model.*norm", "norm"))) == 5
    (problem,) = problems(LLAMA_CONFIG, rule("layers.*norm", "norm"))
    assert "'layers.*norm' matches no module" in problem


def test_patterns_of_one_rule_are_taken_together_and_each_must_match() -> None:
    assert len(apply(skeleton(LLAMA_CONFIG), rule(("model.norm", "*.input_layernorm"), "norm"))) == 3
    assert problems(LLAMA_CONFIG, rule(("model.norm", "*.imput_layernorm"), "norm")) == [
        "plan_overrides[0].match[1]: '*.imput_layernorm' matches no module; "
        "did you mean 'model.layers.*.input_layernorm'?"
    ]


def test_case_matters() -> None:
    assert "matches no module" in problems(LLAMA_CONFIG, rule("*.Input_LayerNorm", "norm"))[0]


def test_a_hit_of_another_type_is_an_error_that_names_it() -> None:
    """One pattern hits the dense MLP of the first layer and the mixtures of the others."""
    moe = "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3MoE"
    assert problems(DEEPSEEK_V3, rule("*.layers.*.mlp", "fused_mlp", module_type=moe)) == [
        "plan_overrides[0].module_type: 1 of the 2 modules that match are no DeepseekV3MoE: "
        "model.layers.0.mlp is a DeepseekV3MLP; narrow the pattern of match"
    ]


def test_without_a_type_all_hits_must_be_alike() -> None:
    (problem,) = problems(DEEPSEEK_V3, rule("*.layers.*.mlp", "fused_mlp"))
    assert problem == (
        "plan_overrides[0].match: matches modules of 2 types: DeepseekV3MLP (model.layers.0.mlp), "
        "DeepseekV3MoE (model.layers.1.mlp); narrow the pattern, or write module_type"
    )


def test_a_subclass_fits_unless_the_type_must_be_exact() -> None:
    assert len(apply(skeleton(LLAMA_CONFIG), rule("model.norm", "norm", module_type="torch.nn.Module"))) == 1
    (problem,) = problems(LLAMA_CONFIG, rule("model.norm", "norm", module_type="torch.nn.Module", exact_type=True))
    assert "1 of the 1 modules that match are no Module exactly: model.norm is a LlamaRMSNorm" in problem


def test_two_rules_on_one_module_are_an_error() -> None:
    assert problems(LLAMA_CONFIG, rule("*norm", "norm"), rule("*input_layernorm", "norm", index=1)) == [
        "plan_overrides[1].match: model.layers.0.input_layernorm, model.layers.1.input_layernorm: claimed by "
        "plan_overrides[0] already: one module, one rule; narrow one of the patterns"
    ]


def test_a_claim_inside_another_is_an_error_whichever_rule_comes_first() -> None:
    for rules in (
        (rule("*.mlp", "fused_mlp"), rule("*.0.mlp.gate_proj", "norm", index=1)),
        (rule("*.0.mlp.gate_proj", "norm"), rule("*.mlp", "fused_mlp", index=1)),
    ):
        (problem,) = problems(LLAMA_CONFIG, *rules)
        assert re.search(r"inside a module that plan_overrides\[\d\] replaces: model.layers.0.mlp.gate_proj", problem)


def test_nested_hits_of_one_rule_are_an_error() -> None:
    assert any(
        "inside a module" in one
        for one in problems(LLAMA_CONFIG, rule("*mlp*", "fused_mlp", module_type="torch.nn.Module"))
    )


def test_all_problems_come_together() -> None:
    found = problems(
        QWEN3_MOE,
        rule("*.nom", "norm"),
        rule("model.norm", "norm", index=1, module_type=NORM),
        rule("*.q_norm", "norm", index=2),
        rule("*.q_nor?", "norm", index=3),
    )
    assert [one.split(":")[0] for one in found] == [
        "plan_overrides[0].match",
        "plan_overrides[1].module_type",
        "plan_overrides[3].match",
    ]


def test_a_shared_module_is_built_once_and_stays_shared() -> None:
    model = skeleton(LLAMA_CONFIG)
    model.model.layers[1].input_layernorm = model.model.layers[0].input_layernorm
    (replaced,) = apply(model, rule("*.0.input_layernorm", "norm"))
    assert replaced.fqns == ("model.layers.0.input_layernorm", "model.layers.1.input_layernorm")
    assert model.model.layers[1].input_layernorm is model.model.layers[0].input_layernorm is replaced.replacement


def test_the_root_is_never_matched() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = None
            self.only = nn.Linear(2, 2)

    model = Root()
    with pytest.raises(InputError, match=r"only: .*norm raises AttributeError"):
        apply(model, rule("*", "norm"))
    assert isinstance(model.only, nn.Linear)
    assert model.only.weight.device == torch.device("cpu")


def test_when_leaves_a_rule_aside_where_its_size_is_one() -> None:
    model = skeleton(LLAMA_CONFIG)
    apply(model, rule("*.mlp", "fused_mlp", when="tp"), rule("model.norm", "norm", index=1))
    assert type(model.model.norm) is Norm
    assert type(model.model.layers[0].mlp).__name__ == "LlamaMLP"


def test_names_and_types_are_checked_for_rules_that_are_left_aside_too() -> None:
    """A laptop finds what a cluster would stumble over; two rules for different topologies may share a module."""
    assert problems(
        LLAMA_CONFIG, rule("*nrom", "norm", when="tp"), rule("*.mlp", "norm", index=1, when="ep", module_type=NORM)
    ) == [
        "plan_overrides[0].match: '*nrom' matches no module; did you mean '*norm'?",
        "plan_overrides[1].module_type: 2 of the 2 modules that match are no LlamaRMSNorm: model.layers.0.mlp is a "
        "LlamaMLP, model.layers.1.mlp is a LlamaMLP; narrow the pattern of match",
    ]
    assert (
        len(apply(skeleton(LLAMA_CONFIG), rule("model.norm", "norm", when="cp"), rule("model.norm", "norm", index=1)))
        == 1
    )
