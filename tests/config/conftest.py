from __future__ import annotations

import pathlib
import textwrap
from collections.abc import Callable, Mapping, Sequence

import pytest

from hp_core.components import Component, Components
from hp_core.config import Recipe, load_recipe
from hp_core.errors import InputError

PARTS = "tests.config.parts"
REPLACEMENTS = "tests.config.replacements"
VALUES = {
    ("hp.models", "net"): f"{PARTS}:net",
    ("hp.losses", "causal_lm"): "tests.config.losses:CausalLm",
    ("hp.optimizers", "adam"): f"{PARTS}:Adam",
    ("hp.optimizers", "sgd"): f"{PARTS}:Sgd",
    ("hp.lr_schedulers", "anything"): f"{PARTS}:anything",
    ("hp.module_replacements", "fast_norm"): f"{REPLACEMENTS}:fast_norm",
    ("hp.module_replacements", "wrapped"): f"{REPLACEMENTS}:Wrapped",
    ("hp.datasets", "rows"): f"{PARTS}:rows",
    ("hp.datasets", "other_rows"): f"{PARTS}:other_rows",
    ("hp.tokenizers", "words"): f"{PARTS}:words",
    ("hp.dataloaders", "torch"): f"{PARTS}:loader",
    ("hp.collators", "pad"): f"{PARTS}:pad",
    ("hp.trainers", "text"): f"{PARTS}:text",
    ("hp.trackers", "tracker"): f"{PARTS}:tracker",
}
COMPONENTS = Components(Component(group, name, value, "parts", "1.0") for (group, name), value in VALUES.items())

# Everything a recipe must have; a test adds sections after it.
MINIMAL = """\
model: {name: net, size: 4}
optimizer: {name: sgd}
dataset: {name: rows}
training: {train_iters: 10}
"""


class Workbench:
    """Writes recipes into a directory and loads them with the components of `parts`."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory

    def write(self, text: str, name: str = "recipe.yaml") -> pathlib.Path:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    def load(
        self, text: str, *overrides: str, env: Mapping[str, str] | None = None, name: str = "recipe.yaml"
    ) -> Recipe:
        return load_recipe(self.write(text, name), overrides, components=COMPONENTS, env=env or {})

    def errors(self, text: str, *overrides: str, env: Mapping[str, str] | None = None) -> list[str]:
        """Return the lines of the error, with file names relative to the directory."""
        with pytest.raises(InputError) as caught:
            self.load(text, *overrides, env=env)
        return self.relative(str(problem) for problem in caught.value.problems)

    def relative(self, lines: Sequence[str] | Callable[[], str]) -> list[str]:
        return [line.replace(f"{self.directory}/", "") for line in lines]  # type: ignore[union-attr]


@pytest.fixture
def bench(tmp_path: pathlib.Path) -> Workbench:
    return Workbench(tmp_path)
