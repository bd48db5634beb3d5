"""A model beside the one that is trained, which stays as it is: a teacher, or a reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from hp_core.model.replacement.replacer import ModuleReplacer
from hp_core.parallel.setup import DistributedSetup
from hp_core.training.built import as_module
from hp_core.training.state import random_state, restore_random_state

# What model components are given for training, which is none of this model's business.
UNTRAINED = dict.fromkeys(("peft_config", "activation_checkpoint", "activation_swap", "compile_config"))


def frozen_model(
    build: Callable[[DistributedSetup], Any],
    setup: DistributedSetup,
    section: str,
    replacer: ModuleReplacer | None = None,
    drawn: dict[str, Any] | None = None,
) -> nn.Module:
    """Build a model without gradients, in evaluation mode, sharded like the one that is trained. Every rank calls it.

    The random streams of the run are afterwards as they were.

    Args:
        build: what builds it for a setup; a component of a recipe is given `UNTRAINED`, too.
        setup: that of the run. Its replacements and its plan are for the model that is trained.
        section: the section of the recipe that asks for it, for messages.
        replacer: what replaces modules of this one.
        drawn: the state of the random streams to build it from; None for that of the run.

    Raises:
        InputError: it is no model.
    """
    random = random_state()
    if drawn is not None:
        restore_random_state(drawn)
    # Plans and replacers are for one model.
    built = build(dataclasses.replace(setup, replacer=replacer, planner=None))
    restore_random_state(random)
    return as_module(built, section).requires_grad_(False).eval()
