"""A loss around a loss hands everything on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hp_core import LossWrapper, RunError
from hp_core.training.loss import HasStepTerms, LossContract, contract_of


class Inner(nn.Module):
    """Declares and does everything that a loss can."""

    reduction = "sum"
    columns = ("w", "margin")
    weight_column = "w"
    ignore_index = 0
    diagnostics = ("seen",)
    needs_statistics = True

    def bind_model(self, model, distributed_setup):
        self.bound = (model, distributed_setup)

    def prepare_model_inputs(self, model_inputs, loss_inputs):
        return {**model_inputs, "prepared": loss_inputs}

    def step_statistics(self, *, model_output, real_tokens):
        return {"tokens": real_tokens.sum()}

    def step_terms(self, *, model_output, real_tokens, num_real_tokens, statistics):
        return {"share": statistics["tokens"] / num_real_tokens}

    def forward(self, *, model_output, labels, w, margin):
        return {"own_loss": (w * margin).sum(), "seen": w.sum()}


class Doubled(LossWrapper):
    def forward(self, *, model_output, labels, **columns):
        entries = self.entries_of(model_output, labels, columns)
        return self.with_entry(entries, "more_loss", torch.ones(()))


def test_everything_is_handed_on():
    inner = Inner()
    loss = Doubled(inner)
    assert contract_of(loss) == contract_of(inner) == LossContract("sum", ("w", "margin"), "w", 0, ("seen",))
    loss.bind_model("model", "setup")
    assert inner.bound == ("model", "setup")
    assert loss.prepare_model_inputs({"a": 1}, {"b": 2}) == {"a": 1, "prepared": {"b": 2}}
    assert isinstance(loss, HasStepTerms)
    assert loss.needs_statistics
    real_tokens = torch.ones(2, 3)
    statistics = loss.step_statistics(model_output=None, real_tokens=real_tokens)
    shares = loss.step_terms(model_output=None, real_tokens=real_tokens, num_real_tokens=12, statistics=statistics)
    assert shares["share"].item() == 0.5
    entries = loss(model_output=None, labels=None, w=torch.tensor([2.0]), margin=torch.tensor([3.0]))
    assert {name: value.item() for name, value in entries.items()} == {"own_loss": 6.0, "seen": 2.0, "more_loss": 1.0}


def test_a_loss_that_declares_nothing_is_handed_on_as_that():
    plain = nn.Module()
    plain.forward = lambda *, model_output, labels: model_output.loss
    loss = Doubled(plain)
    assert contract_of(loss) == LossContract()
    loss.bind_model(None, None)
    assert loss.prepare_model_inputs({"a": 1}, {}) == {"a": 1}
    assert not loss.needs_statistics
    assert loss.step_terms(model_output=None, real_tokens=None, num_real_tokens=1, statistics={}) == {}
    entries = loss(model_output=SimpleNamespace(loss=torch.tensor(2.0)), labels=None)
    assert {name: value.item() for name, value in entries.items()} == {"task_loss": 2.0, "more_loss": 1.0}


def test_two_entries_of_one_name_are_refused():
    with pytest.raises(RunError, match="Doubled has an entry 'more_loss' already"):
        Doubled(Doubled(nn.Identity())).with_entry({"more_loss": torch.ones(())}, "more_loss", torch.ones(()))


def test_a_loss_that_was_not_built_is_refused():
    with pytest.raises(TypeError, match=r"write super\(\).__init__\(loss.build\(\)\)"):
        Doubled("causal_lm")
