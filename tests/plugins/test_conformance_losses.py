"""Focal loss, z-loss and distillation keep every promise that the kit asks of third parties."""

from __future__ import annotations

from hp_core import Target
from hp_core.testing import loss_checks
from hp_core.testing.checks import Check
from hp_plugins.losses.focal import FocalLoss
from hp_plugins.losses.z_loss import ZLoss

FOCAL = Target("loss_fn.loss", "hp.losses", import_path="hp_plugins.losses.focal.FocalLoss")
MODEL_OUTPUT = Target("loss_fn.loss", "hp.losses", import_path="hp_core.training.loss.ModelOutputLoss")
WEIGHTED = Target(
    "loss_fn.loss",
    "hp.losses",
    import_path="hp_plugins.losses.causal_lm.CausalLMLoss",
    arguments={"ignore_index": -1, "token_weights": "weights", "z_loss": 1e-3},
)


@loss_checks(FocalLoss)
def test_focal_loss(check: Check) -> None:
    check()


@loss_checks(FocalLoss, family="llama_tied", gamma=0.5, ignore_index=-1, token_weights="weights")
def test_focal_loss_with_every_option(check: Check) -> None:
    check()


@loss_checks(ZLoss, loss=FOCAL, coefficient=1e-2)
def test_z_loss_around_a_sum(check: Check) -> None:
    check()


@loss_checks(ZLoss, loss=MODEL_OUTPUT, coefficient=1e-2)
def test_z_loss_around_the_mean_that_the_model_computes(check: Check) -> None:
    check()


@loss_checks(ZLoss, loss=WEIGHTED, coefficient=1e-2)
def test_z_loss_around_weighted_tokens(check: Check) -> None:
    check()
