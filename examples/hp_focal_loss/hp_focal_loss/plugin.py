"""The same loss by a hook: active where a recipe lists the plugin, without a `loss_fn`."""

from __future__ import annotations

from hp_core import InputError, Problem, TrainerConfig, hookimpl
from hp_focal_loss.loss import FocalLoss


@hookimpl
def build_loss(config: TrainerConfig) -> FocalLoss:
    """Build the focal loss with its default `gamma`."""
    if config.loss_fn is not None:
        # Answering nevertheless would leave a section of the recipe without effect.
        hint = "remove loss_fn, or the plugin"
        raise InputError(Problem("the plugin 'focal' (hp-focal-loss) builds the loss", path="loss_fn", hint=hint))
    return FocalLoss()
