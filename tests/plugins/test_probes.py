"""The questions put to a model before training find the families and losses that would train wrongly in silence."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, BloomConfig, MambaConfig

from hp_core.errors import InputError
from hp_core.model.tiny import tiny_model
from hp_core.parallel.fsdp import shard_model
from hp_core.parallel.tiny import tiny_setup
from hp_core.training.loss import contract_of
from hp_plugins.trainers.probes import check_call, check_isolation, check_loss, check_shift, require_positions
from hp_plugins.trainers.text import get_batch
from tests.model.tiny import FAMILIES, a_setup, build
from tests.testing.broken_losses import SumLoss, nll

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


class Lookup(torch.nn.Module):
    """Weighs each token by the number of its domain, which must be one of two."""

    reduction = "sum"
    columns = ("domain",)

    def forward(self, *, model_output, labels, domain):
        weights = torch.tensor([1.0, 2.0])[domain]
        return (nll(model_output.logits, labels).view(labels.shape) * weights).sum()


class MeanOnRankOne(SumLoss):
    """Keeps its word on rank 0."""

    def forward(self, *, model_output, labels):
        loss = super().forward(model_output=model_output, labels=labels)
        return loss / (labels != -100).sum() if dist.get_rank() == 1 else loss


class OneRow:
    """A data set, as far as the probe looks at it."""

    def __getitem__(self, index):
        return {"input_ids": np.arange(12), "domain": np.arange(12) % 2}


def problems_of(loss_fn, setup, model):
    contract = contract_of(loss_fn)

    def run(batch):
        outputs = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
        columns = {name: batch[name] for name in contract.columns}
        return loss_fn(model_output=outputs, labels=batch["labels"], **columns), outputs

    try:
        return [str(one) for one in check_loss(loss_fn, model, contract, run, OneRow(), setup)]
    except InputError as error:
        return str(error).splitlines()


def test_columns_of_whole_numbers_hold_what_the_data_holds() -> None:
    with a_setup() as setup:
        assert problems_of(Lookup(), setup, build(setup, FAMILIES["llama"])) == []


def on_ranks(environment):
    with tiny_setup(environment) as setup:
        model = tiny_model("llama")
        shard_model(model, setup)
        names = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
        problems = problems_of(MeanOnRankOne(), setup, model)
        after = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
        has_no_gradients = all(parameter.grad is None for parameter in model.parameters())
        return problems, names == after and len(names) > 0, has_no_gradients and model.training


def test_every_rank_hears_of_what_is_wrong_on_one(hp_ranks) -> None:
    first, second = hp_ranks(on_ranks, 2)
    assert first == second
    (problem,), is_sharded_again, is_as_before = first
    assert "MeanOnRankOne is a mean over the supervised tokens, but declares reduction = 'sum'" in problem
    assert is_sharded_again
    assert is_as_before
