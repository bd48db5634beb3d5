"""The questions put to a model before training find the families and losses that would train wrongly in silence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, MambaConfig

from hp_core.errors import InputError
from hp_plugins.trainers.probes import check_call, check_isolation, check_shift, require_positions
from hp_plugins.trainers.text import get_batch
from tests.model.tiny import FAMILIES, a_setup, build

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_families_that_follow_positions_pass(family, dtype):
    with a_setup() as setup:
        model = build(setup, FAMILIES[family], dtype=dtype)
        check_isolation(model, CPU)
    assert model.training


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4),
        MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=8),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families_that_ignore_positions_are_refused(config, dtype):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with pytest.raises(InputError, match="does not keep packed documents apart"):
        check_isolation(model, CPU)


class Shifting(torch.nn.Module):
    """Computes its loss from labels it shifts itself, as older models do."""

    def __init__(self, once: bool) -> None:
        super().__init__()
        self.head = torch.nn.Embedding(96, 96)
        self.once = once

    def forward(self, input_ids, position_ids, labels, shift_labels, use_cache):
        logits = self.head(input_ids)
        pair = (logits[0], labels[0]) if self.once else (logits[0, :-1], labels[0, 1:])
        return SimpleNamespace(logits=logits, loss=torch.nn.functional.cross_entropy(*pair))


def run(model, sees_labels=True):
    return lambda batch: (model(**get_batch(iter([batch]))[0]), sees_labels)


def test_a_model_that_shifts_again_is_refused():
    torch.manual_seed(0)
    check_shift(run(Shifting(once=True)), CPU)
    check_shift(run(Shifting(once=False), sees_labels=False), CPU)
    with pytest.raises(InputError, match="shifts labels that are shifted already"):
        check_shift(run(Shifting(once=False)), CPU)


def test_logits_that_are_no_numbers_are_refused():
    with a_setup() as setup:
        model = build(setup, FAMILIES["llama"])
        model.lm_head.weight.data.fill_(float("nan"))
        with pytest.raises(InputError, match="keep packed documents apart"):
            check_isolation(model, CPU)


def test_a_model_that_takes_no_positions_is_refused():
    with pytest.raises(InputError, match=r"Linear\.forward takes no input_ids, position_ids, labels, use_cache"):
        check_call(torch.nn.Linear(2, 2))


def test_a_loss_that_keeps_the_positions_from_the_model_is_refused() -> None:
    require_positions({"input_ids": None, "position_ids": None})
    with pytest.raises(InputError, match="loss_fn: prepare_model_inputs drops 'position_ids'"):
        require_positions({"input_ids": None})
