"""What plugins remember of a run: asked for when it is saved, and given back when it resumes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hp_core.errors import InputError, RunError
from hp_core.training.run import Run


def plugin_state(run: Run) -> dict[str, Any]:
    """What each plugin wants to find again, or None, by the plugin's key.

    Raises:
        RunError: a plugin gave something else than a dict.
    """
    found: dict[str, Any] = {}
    for key, save_state in run.plugins.of_each("save_state").items():
        state = save_state(run=run)
        if state is not None and not isinstance(state, dict):
            raise RunError(f"plugin {key!r}: save_state returned a {type(state).__name__}; it returns a dict, or None")
        found[key] = state
    return found


def restore_plugins(run: Run, saved: Mapping[str, Any], path: Path) -> None:
    """Give each plugin what it saved in the checkpoint at `path`.

    Raises:
        InputError: there is no such plugin, or nothing of one; unless the recipe allows for it.
    """
    takers = run.plugins.of_each("load_state")
    for key in sorted(set(saved) ^ set(takers)):
        known = key in takers
        message = (
            f"{path}: has no state of plugin {key!r}"
            if known
            else f"{path}: has state of plugin {key!r}, " + ("which takes none, or isn't active")
        )
        if not run.config.checkpoint.allow_plugin_changes:
            raise InputError(f"{message}; --checkpoint.allow_plugin_changes=true goes on all the same")
        run.console.say(f"{message}: {'it starts anew' if known else 'dropped'}")
    for key, load_state in takers.items():
        if saved.get(key) is not None:
            load_state(run=run, state=saved[key])
