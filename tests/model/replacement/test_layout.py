"""Models with replaced modules: built, loaded, sharded and exported with the numbers of the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hp_core import finish_model, replace_modules
from hp_core.errors import InputError
from hp_core.model.export import export_model
from hp_core.model.load import weight_files
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.testing.ranks import run_ranks
from tests.model.replacement.rules import IDS, checkpoint, logits, replacing, rule, skeleton
from tests.model.tiny import FAMILIES, LLAMA, LLAMA_TIED, QWEN3_MOE, a_setup, build, whole

RULES = {
    "norms": (LLAMA, [("*norm", "norm")]),
    "tied": (LLAMA_TIED, [("*norm", "norm")]),
    "fused_mlp": (LLAMA, [("*.mlp", "fused_mlp"), ("*norm", "norm")]),
    "renamed_mlp": (LLAMA, [("*.mlp", "renamed_mlp")]),
    "fused_layer": (LLAMA, [("model.layers.?", "fused_layer")]),
    "renamed_router": (QWEN3_MOE, [("*.mlp", "renamed_router")]),
    "own_buffers": (LLAMA, [("*norm", "norm_with_table"), ("*.mlp", "renamed_mlp")]),
    "split_experts": (QWEN3_MOE, [("*.experts", "split_experts"), ("*_norm", "norm")]),
}


def rules_of(case: str) -> tuple[dict[str, Any], list[Any]]:
    config, entries = RULES[case]
    return config, [rule(match, factory, index=i) for i, (match, factory) in enumerate(entries)]


@pytest.mark.parametrize("case", RULES)
def test_initial_weights_are_those_of_the_plain_model(case: str) -> None:
    config, rules = rules_of(case)
    with a_setup() as setup:
        plain = build(setup, config)
    with replacing(*rules) as setup:
        model = build(setup, config)
    assert setup.replacer.summaries[0]["modules"]
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", RULES)
def test_a_checkpoint_loads_and_exports_as_in_the_plain_model(case: str, tmp_path: Path) -> None:
    config, rules = rules_of(case)
    plain = checkpoint(config, tmp_path / "hf")
    with replacing(*rules) as setup:
        model = build(setup, pretrained=str(tmp_path / "hf"))
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-6)
    export_model(model, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32")
    assert torch.equal(logits(again), logits(plain))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert again.config.to_diff_dict() == plain.config.to_diff_dict()


def test_a_plain_replacement_keeps_every_key_shape_and_type() -> None:
    config, rules = rules_of("norms")
    with a_setup() as setup:
        plain = build(setup, config)
    with replacing(*rules) as setup:
        model = build(setup, config)
    assert facts(model) == facts(plain)


def facts(model: Any) -> dict[str, Any]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: (tuple(tensor.shape), tensor.dtype, name in parameters and parameters[name].requires_grad)
        for name, tensor in model.state_dict().items()
    }


def test_a_second_model_is_untouched() -> None:
    config, rules = rules_of("fused_mlp")
    with a_setup() as setup:
        before = build(setup, config)
        classes = {type(module): dict(vars(type(module))) for module in before.modules()}
        expected = logits(before)
    with replacing(*rules) as setup:
        build(setup, config)
    with a_setup() as setup:
        after = build(setup, config)
    assert torch.equal(logits(before), expected)
    assert torch.equal(logits(after), expected)
    assert {type(module): dict(vars(type(module))) for module in after.modules()} == classes


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt2"])
def test_buffers_that_no_checkpoint_holds_are_those_of_a_plain_build(family: str) -> None:
    """The allocator is full of junk, so what nothing fills is seen."""
    with a_setup() as setup:
        plain = build(setup, FAMILIES[family])
    junk = [torch.full((size,), torch.nan) for size in range(4, 64)]
    del junk
    with replacing(rule("*_layernorm", "norm", module_type="torch.nn.Module")) as setup:
        model = build(setup, FAMILIES[family])
    found, expected = dict(model.named_buffers()), dict(plain.named_buffers())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("pretrained", [True, False])
def test_buffers_of_a_replacement_s_own_are_filled_whether_or_not_it_has_transforms(
    pretrained: bool, tmp_path: Path
) -> None:
    plain = checkpoint(LLAMA, tmp_path / "hf")
    for empty in (False, True):
        with replacing(rule("*norm", "norm_with_table", empty=empty)) as setup:
            source = {"pretrained": str(tmp_path / "hf")} if pretrained else {"config": LLAMA}
            model = build(setup, **source)
        assert all(torch.equal(one, torch.ones(3)) for name, one in model.named_buffers() if name.endswith("ones"))
        if pretrained:
            torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", ["norms", "fused_mlp"])
def test_frozen_weights_stay_frozen_when_they_are_loaded(case: str, tmp_path: Path) -> None:
    config, rules = rules_of(case)
    checkpoint(config, tmp_path / "hf")
    with replacing(*rules) as setup:
        model = skeleton(config)
        model.model.requires_grad_(False)
        finish_model(model, setup, weight_files(str(tmp_path / "hf"), None))
    assert [name for name, one in model.named_parameters() if one.requires_grad] == ["lm_head.weight"]


def test_a_builder_that_never_fills_its_replacements_is_refused() -> None:
    with replacing(rule("*.mlp", "fused_mlp")) as setup:
        model = skeleton(LLAMA)
        replace_modules(model, setup)
        with pytest.raises(InputError, match=r"model\.layers\.0\.mlp, .*: replaced, but nothing filled"):
            setup.replacer.require_applied()


def _unlike(environment: ProcessEnvironment) -> str:
    factory = ("norm", "ClassNorm")[environment.rank]
    with replacing(rule("model.norm", factory), environment=environment) as setup:
        try:
            build(setup, LLAMA)
        except InputError as error:
            return str(error)
    return "built"


def test_ranks_that_replace_differently_are_refused() -> None:
    for text in run_ranks(_unlike, 2):
        assert text.startswith("module replacements differ between ranks: rank 0 has")


def _ranks(environment: ProcessEnvironment, case: str, source: str | None, out: str) -> dict[str, Any]:
    config, rules = rules_of(case)
    with replacing(*rules, environment=environment) as setup:
        arguments = {"pretrained": source} if source is not None else {"config": config}
        model = build(setup, **arguments)
        part = IDS[setup.rank :: setup.world_size]
        model(input_ids=part, labels=part, use_cache=False).loss.backward()
        gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
        model(input_ids=part, use_cache=False)
        export_model(model, out)
    return gradients


@pytest.mark.parametrize("case", ["fused_layer", "fused_mlp", "own_buffers", "renamed_mlp", "split_experts", "tied"])
@pytest.mark.parametrize("pretrained", [True, False])
def test_two_ranks_have_the_weights_and_gradients_of_one(case: str, pretrained: bool, tmp_path: Path) -> None:
    config, rules = rules_of(case)
    source = None
    if pretrained:
        checkpoint(config, tmp_path / "hf")
        source = str(tmp_path / "hf")
    with replacing(*rules) as setup:
        model = build(setup, **({"pretrained": source} if source else {"config": config}))
    for part in (IDS[0::2], IDS[1::2]):
        model(input_ids=part, labels=part, use_cache=False).loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    found, other = run_ranks(_ranks, 2, case, source, str(tmp_path / "out"))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)
        assert torch.equal(found[name], other[name])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32")
    torch.testing.assert_close(logits(exported), logits(model), rtol=0, atol=1e-6)
