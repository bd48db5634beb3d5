"""A metric that nothing measures is refused before the first step, where that is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hp_core.errors import InputError
from hp_core.observe.trackers import read_metrics
from hp_core.testing.ranks import RankError
from hp_core.training.metric_names import require_measured
from hp_plugins.losses.causal_lm import CausalLMLoss
from tests.e2e.runs import recipe, train


class Plain(nn.Module):
    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Entries(nn.Module):
    def forward(self, *, model_output: Any, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        raise NotImplementedError


class Unnamed(Plain):
    needs_statistics = False

    def step_statistics(self, **_: Any) -> dict[str, torch.Tensor]:
        return {}

    def step_terms(self, **_: Any) -> dict[str, torch.Tensor]:
        return {}


class Unsaid(nn.Module):
    def forward(self, *, model_output: nowhere.Output, labels: torch.Tensor):  # noqa: F821
        raise NotImplementedError


FIXED = ["loss", "grad_norm", "lr", "samples", "eval_loss", "eval_tokens", "rows/any", None]


@pytest.mark.parametrize("loss_fn", [Plain(), Entries(), Unnamed(), Unsaid(), CausalLMLoss()])
@pytest.mark.parametrize("metric", FIXED)
@pytest.mark.parametrize("counts_more", [True, False])
def test_what_every_run_measures_is_fine(loss_fn, metric, counts_more):
    require_measured(metric, loss_fn, counts_more=counts_more)


@pytest.mark.parametrize(
    ("loss_fn", "metric", "counts_more", "hint"),
    [
        (Plain(), "los", False, "did you mean 'loss'?"),
        (Plain(), "gradnorm", False, "did you mean 'grad_norm'?"),
        (Plain(), "evalloss", False, "did you mean 'eval_loss'?"),
        (Plain(), "router_z_loss", False, "what is: data_time_s, epoch, eval_loss"),
        (CausalLMLoss(), "router_zloss", False, "did you mean 'router_z_loss'?"),
        (CausalLMLoss(), "eval_los", True, "did you mean 'eval_loss'?"),
        (Unnamed(), "eval_accuracy", False, "what is: eval_loss, eval_time_s, eval_tokens"),
        (Entries(), "Eval-Loss", True, "did you mean 'eval_loss'?"),
        (Unsaid(), "grad-norm", True, "did you mean 'grad_norm'?"),
    ],
)
def test_what_none_measures_is_refused(loss_fn, metric, counts_more, hint):
    with pytest.raises(InputError) as raised:
        require_measured(metric, loss_fn, counts_more=counts_more)
    (problem,) = raised.value.problems
    assert problem.path == "checkpoint.keep_best.metric"
    assert problem.message == f"no {metric!r} is measured"
    assert problem.hint.startswith(hint)


@pytest.mark.parametrize(
    ("loss_fn", "metric", "counts_more"),
    [
        (Entries(), "z_loss", False),
        (Entries(), "eval_z_loss", False),
        (Unnamed(), "my_term", False),
        (Unsaid(), "anything", False),
        (Plain(), "image_tokens", True),
        (CausalLMLoss(), "router_balance_loss", False),
    ],
)
def test_what_a_loss_or_trainer_may_measure_is_left_to_the_first_row(loss_fn, metric, counts_more):
    require_measured(metric, loss_fn, counts_more=counts_more)


BEST = ("--checkpoint.save_every=1", "--checkpoint.keep_last=1")


def test_a_run_with_a_misspelt_metric_leaves_nothing(tmp_path):
    with pytest.raises((InputError, RankError), match="no 'los' is measured; did you mean 'loss'"):
        train(recipe(tmp_path), *BEST, "--checkpoint.keep_best.metric=los")
    assert not (tmp_path / "run").exists()


def test_what_only_the_first_row_tells_has_a_suggestion(tmp_path):
    loss = "--loss_fn={name: z_loss, coefficient: 1e-3, loss: {name: causal_lm}}"
    with pytest.raises((InputError, RankError), match="no 'task_los' is measured; did you mean 'task_loss'"):
        train(recipe(tmp_path), *BEST, loss, "--checkpoint.keep_best.metric=task_los")
    assert len(read_metrics(tmp_path / "run")) == 1
