"""Each example is refused where it isn't installed, then installed, trained and tested as its README says."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from hp_core.entry_points import installed_version
from hp_core.observe.trackers import read_metrics
from tests.conftest import ROOT
from tests.e2e.runs import hp_train_here, steps
from tests.environments import Environment, shell_commands

EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/setup.cfg"))

# What each recipe says without its package.
REFUSALS = {
    "hp_classifier/recipe.yaml": "\n".join(
        f"{place}.name: no {group} component is named 'hp-classifier:{name}': "
        "the package 'hp-classifier' is not installed; pip install hp-classifier"
        for place, group, name in (
            ("5:10: trainer", "trainer", "classification"),
            ("8:9: model", "model", "sequence_classifier"),
            ("22:9: dataset", "dataset", "labelled"),
            ("29:10: loss_fn", "loss_fn", "classification"),
        )
    ),
    "hp_dpo/recipe.yaml": "\n".join(
        f"{place}.name: no {group} component is named 'hp-dpo:{name}': "
        "the package 'hp-dpo' is not installed; pip install hp-dpo"
        for place, group, name in (
            ("3:10: trainer", "trainer", "dpo"),
            ("18:9: dataset", "dataset", "preferences"),
            ("24:17: loss_fn", "loss_fn", "dpo"),
        )
    ),
    "hp_fast_norm/recipe.yaml": "23:13: plan_overrides[0].replace_module.name: no "
    "plan_overrides.replace_module component is named 'hp-fast-norm:fast_norm': "
    "the package 'hp-fast-norm' is not installed; pip install hp-fast-norm",
    "hp_focal_loss/recipe.yaml": "24:9: loss_fn.name: no loss_fn component is named 'hp-focal-loss:focal': "
    "the package 'hp-focal-loss' is not installed; pip install hp-focal-loss, or did you mean 'hyperparallel:focal'?",
    "hp_focal_loss/recipe_with_plugin.yaml": "5:5: plugins[0]: no plugin is named 'hp-focal-loss:focal': "
    "the package 'hp-focal-loss' is not installed; pip install hp-focal-loss",
    "hp_lion/recipe.yaml": "27:9: optimizer.name: no optimizer component is named 'hp-lion:lion': "
    "the package 'hp-lion' is not installed; pip install hp-lion",
    "hp_scaled_loss/recipe.yaml": "23:13: loss_fn._target_: 'hp_scaled_loss.losses.ScaledModelOutputLoss' can't be "
    "imported: no module named 'hp_scaled_loss'; install its package, or put its directory on PYTHONPATH",
    "hp_scaled_loss/recipe_by_name.yaml": "5:9: loss_fn.name: no loss_fn component is named "
    "'hp-scaled-loss:scaled_model_output': the package 'hp-scaled-loss' is not installed; pip install hp-scaled-loss",
    "hp_zloss/recipe.yaml": "5:5: plugins[0]: no plugin is named 'hp-zloss:zloss': "
    "the package 'hp-zloss' is not installed; pip install hp-zloss",
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT / "examples").as_posix()


def test_every_recipe_of_a_package_has_its_refusal() -> None:
    assert {name_of(path) for example in EXAMPLES for path in example.glob("*.yaml")} == set(REFUSALS)
    assert len(EXAMPLES) == 7


@pytest.mark.parametrize("recipe", REFUSALS)
def test_without_its_package_a_recipe_is_refused(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = recipe.partition("/")[0].replace("_", "-")
    assert installed_version(package) is None, f"this test wants to see {package} missing: pip uninstall {package}"
    monkeypatch.chdir(tmp_path)
    path = ROOT / "examples" / recipe
    done = hp_train_here(str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "".join(f"{path}:{line}\n" for line in REFUSALS[recipe].splitlines())
    assert not list(tmp_path.iterdir())


@pytest.fixture(params=EXAMPLES, ids=name_of)
def runs(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Path]:
    """Follow the README of an example in a folder like the checkout; the run of each recipe, by the recipe's name."""
    example: Path = request.param
    # Building leaves files in the sources.
    shutil.copytree(example, tmp_path / "examples" / example.name)
    environment = Environment(tmp_path / "environment")
    done: dict[str, Path] = {}
    kinds = []
    for command in shell_commands(example / "README.md"):
        program = command.split()[0]
        kinds.append(program)
        if program == "hp-train":
            recipe = Path(command.split()[1]).stem
            printed = environment.succeed(command, tmp_path)
            done[recipe] = tmp_path / re.search(r"^run directory: (.*)$", printed, re.MULTILINE)[1]
        else:
            environment.succeed(command, tmp_path)
    assert kinds == ["pip", *["hp-train"] * len(list(example.glob("*.yaml"))), "pip", "python"]
    return done


def manifest(run: Path) -> dict[str, Any]:
    return json.loads((run / "manifest.json").read_text())


def took_part(run: Path) -> set[str]:
    """`package:name` of each plugin and component in the run that is none of ours."""
    facts = manifest(run)
    return {
        f"{one['distribution']}:{one['name']}"
        for one in [*facts["plugins"], *facts["components"]]
        if one["distribution"] != "hyperparallel"
    }


def test_an_example_works_as_its_readme_says(runs: dict[str, Path], request: pytest.FixtureRequest) -> None:
    for run in runs.values():
        losses = steps(read_metrics(run))
        assert losses[-1] < losses[0]
    check = CHECKS[request.node.callspec.params["runs"].name]
    check(runs)


def check_classifier(runs: dict[str, Path]) -> None:
    kinds = {"classification", "labelled", "sequence_classifier"}
    assert took_part(runs["recipe"]) == {f"hp-classifier:{kind}" for kind in kinds}
    (accuracy,) = [row["eval_accuracy"] for row in read_metrics(runs["recipe"])[-1:]]
    assert accuracy > 0.95
    assert manifest(runs["recipe"])["export"]["possible"] is True


def check_dpo(runs: dict[str, Path]) -> None:
    assert took_part(runs["recipe"]) == {"hp-dpo:dpo", "hp-dpo:preferences"}
    rows = read_metrics(runs["recipe"])
    assert rows[-1]["eval_reward_accuracy"] > 0.95
    margins = [row["reward_margin"] for row in rows if "reward_margin" in row]
    assert 0 < margins[0] < 0.1
    assert margins[-1] > 2
    assert manifest(runs["recipe"])["export"]["possible"] is True


def check_focal_loss(runs: dict[str, Path]) -> None:
    assert took_part(runs["recipe"]) == took_part(runs["recipe_with_plugin"]) == {"hp-focal-loss:focal"}
    assert manifest(runs["recipe"])["plugins"] == []
    assert steps(read_metrics(runs["recipe"])) == steps(read_metrics(runs["recipe_with_plugin"]))


def check_scaled_loss(runs: dict[str, Path]) -> None:
    assert took_part(runs["recipe"]) == set()
    assert took_part(runs["recipe_by_name"]) == {"hp-scaled-loss:scaled_model_output"}
    assert steps(read_metrics(runs["recipe"])) == steps(read_metrics(runs["recipe_by_name"]))


def check_lion(runs: dict[str, Path]) -> None:
    assert took_part(runs["recipe"]) == {"hp-lion:lion"}


def check_fast_norm(runs: dict[str, Path]) -> None:
    assert took_part(runs["recipe"]) == {"hp-fast-norm:fast_norm"}
    (replaced,) = manifest(runs["recipe"])["replaced_modules"]
    layers = [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("input", "post_attention")]
    assert sorted(replaced["modules"]) == [*(f"{layer}_layernorm" for layer in layers), "model.norm"]


def check_zloss(runs: dict[str, Path]) -> None:
    assert took_part(runs["recipe"]) == {"hp-zloss:zloss"}
    for row in read_metrics(runs["recipe"]):
        prefix = "eval_" if "eval_loss" in row else ""
        assert row[f"{prefix}z_loss"] > 0
        assert row[f"{prefix}task_loss"] + row[f"{prefix}z_loss"] == pytest.approx(row[f"{prefix}loss"], rel=1e-12)


CHECKS = {
    "hp_classifier": check_classifier,
    "hp_dpo": check_dpo,
    "hp_fast_norm": check_fast_norm,
    "hp_focal_loss": check_focal_loss,
    "hp_lion": check_lion,
    "hp_scaled_loss": check_scaled_loss,
    "hp_zloss": check_zloss,
}
