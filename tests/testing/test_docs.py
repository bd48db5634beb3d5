"""The page about the kit: its tables are the checks, and its examples pass."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hp_core.testing.checks import Check
from hp_core.testing.hooks import HookChecks
from hp_core.testing.loss_steps import LossCase
from hp_core.testing.losses import LossChecks
from hp_core.testing.optimizer_steps import OptimizerCase
from hp_core.testing.optimizers import OptimizerChecks
from hp_core.testing.replacement_steps import ReplacementCase
from hp_core.testing.replacements import ReplacementChecks
from hp_core.testing.trainer_runs import TrainerCase
from hp_core.testing.trainers import TrainerChecks
from tests.conftest import ROOT
from tests.testing import broken_losses, broken_optimizers, broken_plugins, broken_replacements, broken_trainers

TEXT = (ROOT / "docs" / "testing-a-plugin.md").read_text(encoding="utf-8")
CHECKS = {
    "losses": LossChecks(LossCase(broken_losses.SumLoss)),
    "optimizers": OptimizerChecks(OptimizerCase(broken_optimizers.Momentum)),
    "replacements": ReplacementChecks(ReplacementCase(broken_replacements.norm, "llama", ("*norm",))),
    "trainers": TrainerChecks(TrainerCase(broken_trainers.Plain)),
    "hooks": HookChecks(broken_plugins.watches),
}


def rows(checks: list[Check]) -> list[str]:
    return [f"| `{check.name}` | {check.promise} |" for check in checks]


@pytest.mark.parametrize("kind", CHECKS)
def test_every_check_is_in_its_table(kind: str) -> None:
    table = TEXT.split(f"<!-- checks of {kind} -->")[1].split("<!-- end -->")[0]
    assert [line for line in table.splitlines() if line.startswith("| `")] == rows(CHECKS[kind].checks())


def example(part: str) -> dict[str, Any]:
    """The names that a block of the page defines."""
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if part in block]
    module = ModuleType("example")
    exec(compile(code, "testing-a-plugin.md", "exec"), vars(module))
    return vars(module)


def test_the_example_of_a_run_passes(hp_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tutorial = (ROOT / "docs" / "writing-a-plugin.md").read_text(encoding="utf-8")
    (loss,) = re.findall(r"`my_project/losses.py`:\n\n```python\n(.*?)```", tutorial, re.DOTALL)
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project" / "losses.py").write_text(loss)
    monkeypatch.syspath_prepend(str(tmp_path))
    example("test_two_ranks_train_like_one")["test_two_ranks_train_like_one"](hp_run)


def test_the_example_of_the_families_passes() -> None:
    example("test_every_family_computes_a_loss")["test_every_family_computes_a_loss"]()
