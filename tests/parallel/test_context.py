"""Sequences cut among ranks: every token and target once, and attention that sees what it would see uncut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from hp_core.config import load_recipe
from hp_core.config.models import AcceleratorConfig
from hp_core.data.protocols import IGNORED_LABEL
from hp_core.errors import InputError
from hp_core.parallel.context.sequence import SLICE, SequenceSlice, cut, slices_of
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.sizes import check_sizes
from hp_core.testing.models import COMMON, tiny_config
from hp_core.testing.ranks import run_ranks
from hp_core.testing.setups import tiny_setup
from tests.e2e.runs import recipe
from tests.model.tiny import build

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
HEADS = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}
# None of the windows is within the rows of the trial.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "conv": (
        {"model_type": "lfm2", **COMMON, "layer_types": ["conv", "full_attention"]},
        "layers of type 'conv' would see this rank's part of a sequence alone",
    ),
    "linear attention": (
        {"model_type": "qwen3_next", **COMMON, **MOE, "layer_types": ["linear_attention", "full_attention"]},
        "layers of type 'linear_attention' would see this rank's part of a sequence alone",
    ),
    "attention of its own": (
        {"model_type": "falcon", **HEADS, "alibi": False},
        "falcon: 2 of 2 layers don't use transformers' attention functions, and would see this rank's part of a "
        "sequence alone",
    ),
    "window": (
        {
            "model_type": "qwen2_moe",
            **COMMON,
            **MOE,
            "use_sliding_window": True,
            "sliding_window": 64,
            "max_window_layers": 2,
        },
        "the mask of Qwen2MoeAttention has a window or chunk of 64 tokens, and the attention itself is told of none",
    ),
    "chunks": (
        {
            "model_type": "llama4_text",
            **COMMON,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 64,
            "num_local_experts": 2,
        },
        "the mask of Llama4TextAttention has a window or chunk of 64 tokens, and the attention itself is told of none",
    ),
    "mask of its own": (
        {"model_type": "doge", **COMMON},
        "DogeAttention is given a mask that the model makes itself",
    ),
    "dynamic": (
        {**tiny_config("llama"), "rope_parameters": ROPE},
        "rotary embeddings of rope_type 'dynamic' depend on the length of the input, of which a rank has a part",
    ),
    "longrope": (
        {"model_type": "phi3", **COMMON, "pad_token_id": 0, "eos_token_id": 0, "rope_parameters": LONG_ROPE},
        "rotary embeddings of rope_type 'longrope' depend on the length of the input, of which a rank has a part",
    ),
}


class Group:
    """As much of a process group as cutting needs."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def size(self) -> int:
        return self.num_ranks


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_each_position_is_held_once_and_by_equal_parts(balanced, num_ranks):
    parts = slices_of(24, num_ranks, balanced=balanced)
    assert sorted(torch.cat(parts).tolist()) == list(range(24))
    assert {len(part) for part in parts} == {24 // num_ranks}


def test_head_and_tail_by_hand():
    assert [part.tolist() for part in slices_of(8, 2, balanced=True)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [part.tolist() for part in slices_of(8, 2, balanced=False)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_balanced_parts_have_the_same_work(num_ranks):
    work = [int((part + 1).sum()) for part in slices_of(32, num_ranks, balanced=True)]
    assert len(set(work)) == 1
    uneven = [int((part + 1).sum()) for part in slices_of(32, num_ranks, balanced=False)]
    assert uneven == sorted(uneven)
    assert uneven[-1] > work[0]


@st.composite
def batches(draw):
    length = draw(st.integers(2, 17))
    starts = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    positions, count = [], 0
    for index, is_start in enumerate(starts):
        count = 0 if is_start or index == 0 else count + 1
        positions.append(count)
    labels = draw(st.lists(st.sampled_from([IGNORED_LABEL, 1, 2, 3]), min_size=length, max_size=length))
    return torch.tensor([positions]), torch.tensor([labels])


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from([2, 3, 4]), st.booleans(), st.sampled_from([None, 1, 3]))
def test_tokens_targets_and_attention_are_those_of_the_whole(batch, num_ranks, balanced, window):
    positions, labels = batch
    length = labels.shape[1]
    ids = torch.arange(length)[None]
    columns = torch.arange(length)[None].float()
    seen: dict[int, tuple[int, int, float, list[int]]] = {}
    for rank in range(num_ranks):
        model_inputs, loss_inputs = cut(
            {"input_ids": ids, "position_ids": positions, "use_cache": False},
            {"labels": labels, "w": columns, "sample_ids": torch.tensor([7])},
            rank=rank,
            group=Group(num_ranks),
            balanced=balanced,
        )
        part = model_inputs[SLICE]
        assert isinstance(part, SequenceSlice)
        assert model_inputs["use_cache"] is False
        assert loss_inputs["sample_ids"].tolist() == [7]
        mask = part.mask(window)
        assert mask.shape == (1, 1, len(part.positions), len(part.all_positions))
        for place, position in enumerate(part.positions.tolist()):
            if position >= length:
                assert loss_inputs["labels"][0, place] == IGNORED_LABEL
                assert loss_inputs["is_padding"][0, place]
                continue
            assert position not in seen
            sees = sorted(part.all_positions[mask[0, 0, place]].tolist())
            seen[position] = (
                int(model_inputs["input_ids"][0, place]),
                int(loss_inputs["labels"][0, place]),
                float(loss_inputs["w"][0, place]),
                sees,
            )
            assert model_inputs["position_ids"][0, place] == positions[0, position]
    assert sorted(seen) == list(range(length))
    for position, (token, label, column, sees) in seen.items():
        assert (token, label, column) == (position, int(labels[0, position]), float(position))
        start = position - int(positions[0, position])
        first = start if window is None else max(start, position - window + 1)
        assert sees == list(range(first, position + 1))


def test_lengths_that_divide_are_not_padded():
    inputs = {"input_ids": torch.ones(2, 8), "position_ids": torch.arange(8).expand(2, 8)}
    _, loss_inputs = cut(inputs, {"labels": torch.ones(2, 8)}, rank=0, group=Group(2), balanced=True)
    assert set(loss_inputs) == {"labels"}
    assert loss_inputs["labels"].shape == (2, 4)


def test_rows_that_fill_up_stay_padding_where_the_length_is_padded():
    inputs = {"input_ids": torch.ones(2, 3), "position_ids": torch.arange(3).expand(2, 3)}
    loss_inputs = {"labels": torch.full((2, 3), 5), "sample_ids": torch.tensor([4, -1])}
    parts = [cut(inputs, loss_inputs, rank=rank, group=Group(2), balanced=False)[1] for rank in (0, 1)]
    is_padding = torch.cat([part["is_padding"] for part in parts], dim=1)
    assert is_padding.tolist() == [[False, False, False, True], [True, True, True, True]]


def refusals(environment: ProcessEnvironment, configs: list[dict[str, Any]]) -> list[str]:
    """What is said of each model where two ranks share its sequences; nothing where it is built."""
    found = []
    with tiny_setup(environment, accelerator=AcceleratorConfig(cp_size=2)) as setup:
        for config in configs:
            try:
                build(setup, config)
            except InputError as error:
                found.append(str(error))
            else:
                found.append("")
    return found


def test_models_that_would_train_on_other_numbers_are_refused_on_all_ranks() -> None:
    configs = [config for config, _ in REFUSED.values()]
    wanted = [f"accelerator.cp_size: {message}; remove 'cp_size'" for _, message in REFUSED.values()]
    assert run_ranks(refusals, 2, configs) == [wanted] * 2


def shifted(mlp: nn.Module, hidden: torch.Tensor, plain: Any = LlamaMLP.forward) -> torch.Tensor:
    """An MLP that also adds what it made of the token before."""
    made = plain(mlp, hidden)
    return made + made.roll(1, dims=1)


def mixing(environment: ProcessEnvironment, where: str, dtype: str) -> tuple[str, bool, bool]:
    """What is said of a llama that mixes tokens outside of attention, and whether the trial left a trace."""
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        tiny_setup(environment, accelerator=AcceleratorConfig(cp_size=2)) as setup,
    ):
        if where == "mlp":
            monkeypatch.setattr(LlamaMLP, "forward", shifted)
        before = torch.get_rng_state()
        try:
            model = build(setup, tiny_config("llama"), dtype=dtype)
        except InputError as error:
            return error.problems[0].message, True, True
        same = bool(torch.equal(before, torch.get_rng_state()))
        return "", same, all(module.training for module in model.modules())


@pytest.mark.parametrize(("where", "dtype"), [("mlp", "float32"), ("", "bfloat16")])
def test_a_trial_sees_what_no_rule_does(where: str, dtype: str) -> None:
    message = "llama computes other logits when its sequences are cut, so it would train on other numbers"
    assert run_ranks(mixing, 2, where, dtype) == [(message if where else "", True, True)] * 2


def test_what_a_recipe_says_is_refused_before_anything_is_built(tmp_path) -> None:
    path = recipe(tmp_path)
    values = ["--accelerator.cp_size=2", "--model.config.rope_parameters={rope_type: dynamic, factor: 2.0}"]
    with pytest.raises(InputError) as error:
        check_sizes(load_recipe(path, values).config, 2)
    (problem,) = error.value.problems
    assert problem.path == "accelerator.cp_size"
    assert problem.message == REFUSED["dynamic"][1]
