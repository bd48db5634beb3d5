"""What a loss may declare, and what it is called with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hp_core.errors import InputError, RunError
from hp_core.training.built import require_loss_call
from hp_core.training.columns import column_arguments
from hp_core.training.loss import ModelOutputLoss, columns_of


def loss(declared: Any, forward: Any = None) -> nn.Module:
    class Weighted(nn.Module):
        def forward(self, *, model_output: Any, labels: Any, weights: Any = None, margin: Any = None) -> Any:
            return None

    module = Weighted()
    if forward is not None:
        module.forward = forward
    module.columns = declared
    return module


def test_what_a_loss_declares() -> None:
    assert columns_of(ModelOutputLoss()) == ()
    assert columns_of(loss(())) == ()
    assert columns_of(loss(["margin", "weights"])) == ("margin", "weights")
    assert columns_of(loss(("x", "y"), lambda *, model_output, labels, **columns: None)) == ("x", "y")
    assert columns_of(loss(("mtp_labels",), lambda model_output, labels, mtp_labels: None)) == ("mtp_labels",)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ("weights", "Weighted.columns is 'weights', not a tuple of names; write columns = (\"weights\",)"),
        ({"weights"}, "is {'weights'}, not a tuple of names"),
        (("weights", 3), "is ('weights', 3), not a tuple of names"),
        (("",), "is ('',), not a tuple of names"),
        (None, "is None, not a tuple of names"),
        (("weights", "margin", "weights"), "names one twice: weights, margin, weights"),
        (("labels",), "names 'labels', which is no column"),
        (("weights", "input_ids"), "names 'input_ids', which is no column"),
        (("sample_ids",), "names 'sample_ids', which is no column"),
        (
            ("weights", "wieghts"),
            "Weighted declares the column 'wieghts', which its forward does not take; "
            "write def forward(self, *, model_output, labels, weights, wieghts)",
        ),
    ],
)
def test_what_a_loss_may_not_declare(declared: Any, said: str) -> None:
    with pytest.raises(InputError) as caught:
        columns_of(loss(declared))
    assert caught.value.problems[0].path == "loss_fn"
    assert said in str(caught.value)


def test_a_positional_only_argument_is_no_column() -> None:
    with pytest.raises(InputError, match="its forward does not take"):
        columns_of(loss(("weights",), lambda weights, /, model_output, labels: None))


def test_a_loss_that_needs_more_than_it_declares_is_told_how() -> None:
    needy = loss(("weights",), lambda *, model_output, labels, weights, margin: None)
    with pytest.raises(InputError) as caught:
        require_loss_call(needy, columns_of(needy))
    assert str(caught.value) == (
        "loss_fn: Weighted.forward can't be called with model_output, labels and weights; "
        "declare columns = ('weights', 'margin') to be given arrays of the rows"
    )
    require_loss_call(needy, ("weights", "margin"))


def test_only_declared_columns_go_to_the_loss() -> None:
    inputs = {"labels": torch.zeros(2, 3), "weights": torch.ones(2, 3), "margin": torch.ones(2, 3)}
    assert column_arguments(inputs, ()) == {}
    assert list(column_arguments(inputs, ("margin",))) == ["margin"]
    assert column_arguments(inputs, ("margin",))["margin"] is inputs["margin"]


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (None, "takes the column 'weights', which the micro-batch lacks"),
        ([[1.0]], "takes the column 'weights', which the micro-batch lacks"),
        (torch.ones(2, 1), r"has the shape \(2, 1\), its labels \(2, 3\)"),
        (torch.ones(3), r"has the shape \(3,\), its labels \(2, 3\)"),
    ],
)
def test_a_column_that_was_lost_or_cut_is_named(weights: Any, said: str) -> None:
    inputs = {"labels": torch.zeros(2, 3), "weights": weights}
    with pytest.raises(RunError, match=said):
        column_arguments(inputs, ("weights",))
