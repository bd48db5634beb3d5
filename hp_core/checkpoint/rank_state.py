"""What a rank keeps for itself: its random numbers, and what its loss and the plugins remember."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hp_core.checkpoint.layout import own_file
from hp_core.errors import InputError, Problem, RunError
from hp_core.training.state import random_state

_PLAIN = (bool, int, float, str)


@dataclass(frozen=True)
class RankState:
    """One rank's, as it was saved; `plugins` is by the name of the plugin."""

    random: dict[str, Any]
    loss: dict[str, Any]
    plugins: dict[str, dict[str, Any]]


def packed(loss_fn: nn.Module, model: nn.Module, plugin_state: Mapping[str, Any]) -> bytes:
    """A rank's state as it is now, as a file.

    Raises:
        RunError: a plugin has handed over what can't be stored.
    """
    for name, state in plugin_state.items():
        _require_plain(name, "save_state", state)
    value = {"random": random_state(), "loss": loss_state(loss_fn, model), "plugins": dict(plugin_state)}
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpacked(directory: Path, rank: int) -> RankState:
    """The state that a rank has saved; nothing is run to read it."""
    name = f"rank_{rank:05d}.pt"
    if (directory / name).exists():
        return RankState(**_loaded(directory, name))
    # Before there were plugins in it.
    random, loss = (_loaded(directory, f"{kind}_{name}") for kind in ("random", "loss"))
    return RankState(random, loss, {})


def loss_state(loss_fn: nn.Module, model: nn.Module) -> dict[str, Any]:
    """What a loss remembers, without the tensors of the model, which it may hold as well."""
    of_model = {id(one) for one in (*model.parameters(), *model.buffers())}
    state = loss_fn.state_dict(keep_vars=True)
    own = {name: one for name, one in state.items() if id(one) not in of_model}
    return {name: one.detach() if isinstance(one, torch.Tensor) else one for name, one in own.items()}


def restore_loss(loss_fn: nn.Module, model: nn.Module, state: dict[str, Any], path: Path) -> None:
    """Give a loss back what it remembered.

    Raises:
        InputError: it has no place for it.
    """
    expected = set(loss_state(loss_fn, model))
    if expected != set(state):
        missing, strange = sorted(expected - set(state)), sorted(set(state) - expected)
        found = f"lacks {missing[0]!r}" if missing else f"holds {strange[0]!r}, which the loss has no place for"
        hint = "a loss registers all its buffers when it is built"
        message = f"{path}: what {type(loss_fn).__name__} remembered {found}"
        raise InputError(Problem(message, path="loss_fn", hint=hint))
    try:
        loss_fn.load_state_dict(state, strict=False)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        message = f"{path}: what {type(loss_fn).__name__} remembered does not fit: {reason}"
        raise InputError(Problem(message, path="loss_fn")) from error


def _loaded(directory: Path, name: str) -> Any:
    return torch.load(own_file(directory, name), weights_only=True, map_location="cpu")


def _require_plain(plugin: str, place: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, one in value.items():
            if not isinstance(key, str):
                raise RunError(f"plugin {plugin!r}: {place} has the key {key!r}; keys are strings")
            _require_plain(plugin, f"{place}[{key!r}]", one)
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            _require_plain(plugin, f"{place}[{index}]", one)
    elif value is not None and type(value) not in _PLAIN and type(value) not in (torch.Tensor, nn.Parameter):
        raise RunError(
            f"plugin {plugin!r}: {place} is a {type(value).__name__}; a checkpoint holds dicts, lists, numbers, "
            "strings, None and plain tensors of a plugin"
        )
