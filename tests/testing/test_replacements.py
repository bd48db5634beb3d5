"""Each check of a replacement catches one that breaks its promise, and lets pass those that keep all."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from hp_core.testing import replacement_checks
from hp_core.testing.checks import BrokenPromiseError, Check
from hp_core.testing.replacement_steps import ReplacementCase
from hp_core.testing.replacements import ReplacementChecks
from tests.testing import broken_replacements as broken
from tests.testing.caught import failures

ON_RANKS = {"two_ranks", "sharded_export"}


@replacement_checks(broken.norm, match="*norm", refuses=[nn.LayerNorm(4)])
def test_a_norm_keeps_every_promise(check: Check) -> None:
    check()


@replacement_checks(
    broken.norm,
    family="qwen3_moe",
    match=["*.self_attn.*_norm", "model.norm"],
    module_type=Qwen3MoeRMSNorm,
    exact_type=True,
    refuses=[nn.Linear(1, 1)],
)
def test_it_keeps_them_in_another_family(check: Check) -> None:
    check()


@replacement_checks(broken.knows_its_layer, match="*layers*norm", skip={"refusals": "it takes any norm"})
def test_one_that_reads_the_context_keeps_every_promise(check: Check) -> None:
    check()


@replacement_checks(broken.fused_mlp, family="llama_tied", match="*.mlp", skip={"refusals": "it takes any MLP"})
def test_one_that_changes_the_layout_keeps_every_promise(check: Check) -> None:
    check()


# The factory, what it matches, the checks that catch it, and a part of what the first of them says.
NORMS, MLPS = ("*norm",), ("*.mlp",)
CAUGHT = [
    (broken.bypasses_hooks, NORMS, ["replaces"], "the model never calls model.layers.0.input_layernorm"),
    (
        broken.ignores_weight,
        NORMS,
        ["same_numbers", "half_precision", "export"],
        "with the replacement the value of logits is off by",
    ),
    (broken.other_epsilon, NORMS, ["same_numbers", "export"], "the tolerance is too small for its rounding"),
    (broken.detaches_weight, NORMS, ["same_numbers"], "only one side has ['model.layers.0.input_layernorm.weight'"),
    (broken.wrong_backward, NORMS, ["same_numbers"], "with the replacement the gradient of"),
    (broken.halves_in_training, MLPS, ["same_numbers"], "with the replacement in training mode the value of logits"),
    (
        broken.writes_weight,
        NORMS,
        ["same_state", "same_numbers"],
        "after a forward and a backward pass: model.layers.0.input_layer",
    ),
    (
        broken.freezes,
        NORMS,
        ["same_state", "same_numbers"],
        "requires_grad of model.layers.0.input_layernorm.weight is False instead",
    ),
    (broken.leaves_junk, MLPS, ["meta_build"], "of the buffers: model.layers.0.mlp.scale is off by up to nan"),
    (broken.stays_in_fp32, NORMS, ["half_precision"], "it raises RuntimeError: expected m1 and m2 to have the same"),
    (broken.overflows_in_half, NORMS, ["half_precision"], "the logits are not finite"),
    (broken.shrinks_in_half, NORMS, ["half_precision"], "in bf16 the value of logits is off by"),
    (broken.remembers_originals, MLPS, ["export"], "in the reloaded model the value of logits is off by"),
    (broken.prepacks, NORMS, ["export", "same_state", "same_numbers"], "whenever they are read"),
    (broken.patches_class, NORMS, ["second_model_untouched"], "modeling_llama.LlamaRMSNorm.forward for every model"),
    (broken.patches_module, NORMS, ["second_model_untouched"], "modeling_llama.apply_rotary_pos_emb for every model"),
    (broken.takes_anything, NORMS, ["refusals"], "it takes a LayerNorm"),
    (broken.stumbles, NORMS, ["refusals"], "for a LayerNorm it raises AttributeError"),
]


def case_of(factory: Any, match: tuple[str, ...]) -> ReplacementCase:
    refuses = (nn.LayerNorm(4),) if match == NORMS else ()
    return ReplacementCase(factory, "llama", match, refuses=refuses)


@pytest.mark.parametrize(
    ("factory", "match", "names", "text"), CAUGHT, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_broken_promise_is_caught_by_its_own_check(
    factory: Any, match: tuple[str, ...], names: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two of them change these for good.
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", modeling_llama.LlamaRMSNorm.forward)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)
    checks = ReplacementChecks(case_of(factory, match)).checks()
    found = failures(checks, ON_RANKS)
    assert set(found) == set(names), found
    assert f"{factory.__name__} breaks {names[0]!r}" in found[names[0]]
    assert text in found[names[0]]


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (broken.copies_weight, "holds a copy of the parameter 'weight'"),
        (broken.keeps_tensor, "write register_buffer"),
    ],
)
def test_what_the_engine_refuses_is_told_by_the_first_check(factory: Any, text: str) -> None:
    (check, *_) = ReplacementChecks(case_of(factory, NORMS)).checks()
    with pytest.raises(BrokenPromiseError, match="breaks 'replaces'") as caught:
        check()
    assert text in str(caught.value)


def test_a_pattern_without_a_match_is_told_by_the_first_check() -> None:
    (check, *_) = ReplacementChecks(case_of(broken.norm, ("*.norms",))).checks()
    with pytest.raises(BrokenPromiseError, match=r"'\*\.norms' matches no module"):
        check()


@pytest.mark.parametrize(
    ("factory", "names", "text"),
    [
        (broken.other_on_ranks, ["two_ranks"], "sharded over two ranks the loss is"),
        (broken.saves_otherwise_on_ranks, ["sharded_export"], "after reloading: logits is off by"),
    ],
)
def test_what_breaks_on_two_ranks_is_caught(factory: Any, names: list[str], text: str) -> None:
    found = failures(ReplacementChecks(case_of(factory, NORMS)).checks())
    assert sorted(found) == sorted(names), found
    assert text in found[names[0]]


def test_refusals_are_skipped_unless_modules_are_given() -> None:
    (skipped,) = [one for one in replacement_checks(broken.norm, match="*norm").mark.args[1] if one.marks]
    assert skipped.id == "refusals"
    with pytest.raises(ValueError, match="no tiny model of the family 'lama'; there are llama, "):
        replacement_checks(broken.norm, family="lama", match="*norm")


def test_every_check_catches_something() -> None:
    """Those that the other tests above are for, and those that their table names first."""
    first = {names[0] for *_, names, _ in CAUGHT}
    assert first | ON_RANKS == {check.name for check in ReplacementChecks(case_of(broken.norm, NORMS)).checks()}
