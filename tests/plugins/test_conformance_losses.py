"""Focal loss, z-loss and distillation keep every promise that the kit asks of third parties."""

from __future__ import annotations

from hp_core import Target
from hp_core.testing import loss_checks
from hp_core.testing.checks import Check
from hp_plugins.losses.distillation import DistillationLoss
from hp_plugins.losses.focal import FocalLoss
from hp_plugins.losses.z_loss import ZLoss
from tests.plugins.losses.teachers import teacher

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


# Teachers are in float64, since the kit takes derivatives of losses in it.
# The divergence alone looks at where the targets are, not at what they are.
ONLY_PLACES = dict.fromkeys(("every_target_counts", "labels_shifted_once"), "the divergence needs no targets")


@loss_checks(DistillationLoss, teacher=teacher("tiny_teacher", dtype="float64"))
def test_distillation(check: Check) -> None:
    check()


@loss_checks(DistillationLoss, teacher=teacher("tiny_teacher", dtype="float64"), kl_weight=1.0, skip=ONLY_PLACES)
def test_distillation_without_targets(check: Check) -> None:
    check()


@loss_checks(
    DistillationLoss,
    family="llama_tied",
    teacher=teacher("tiny_teacher", dtype="float64", family="gemma2"),
    direction="reverse",
    temperature=2.0,
    kl_weight=0.5,
    ignore_index=-1,
    token_weights="weights",
    chunk_size=7,
)
def test_distillation_with_every_option(check: Check) -> None:
    check()


@loss_checks(
    DistillationLoss,
    family="gemma2",
    teacher=teacher("tiny_teacher", dtype="float64", family="qwen3_moe"),
    kl_weight=0.9,
    memory_budget_mib=1,
)
def test_distillation_of_capped_logits(check: Check) -> None:
    check()
