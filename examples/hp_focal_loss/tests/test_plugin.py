"""The plugin builds the loss that the component builds, and lets no section of the recipe go to waste."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hp_core import InputError
from hp_core.testing import hook_checks
from hp_focal_loss import plugin
from hp_focal_loss.loss import FocalLoss


@hook_checks("hp_focal_loss.plugin")
def test_the_promises_of_a_plugin(check):
    check()


def test_it_builds_the_loss_of_the_component():
    built = plugin.build_loss(SimpleNamespace(loss_fn=None))
    assert isinstance(built, FocalLoss)
    assert built.gamma == FocalLoss().gamma == 2.0


def test_a_recipe_with_a_loss_of_its_own_is_refused():
    with pytest.raises(InputError, match=r"loss_fn: the plugin 'focal' \(hp-focal-loss\) builds the loss; remove"):
        plugin.build_loss(SimpleNamespace(loss_fn=object()))
