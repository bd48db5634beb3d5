"""What the command tests share."""

from __future__ import annotations

import argparse
import pathlib
from types import ModuleType

import pytest

from hp_core.components import Components
from tests.config.conftest import COMPONENTS


def use_components(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the test components the installed ones."""
    monkeypatch.setattr(Components, "discover", classmethod(lambda cls: COMPONENTS))


def invoke(command: ModuleType, *arguments: str, overrides: tuple[str, ...] = ()) -> int:
    """Run one command as `hp-train` does."""
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args([command.__name__.rpartition(".")[2], *arguments])
    args.overrides = list(overrides)
    code: int = args.func(args)
    return code


def write(directory: pathlib.Path, text: str, name: str = "recipe.yaml") -> str:
    """Write a recipe and return its path."""
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return str(path)
