"""The public API: what it holds, that importing it is cheap, and that examples and first-party recipes are valid."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import hp_core
from hp_core.config import load_recipe
from tests.conftest import ROOT

API = {
    "ArgumentError": "class",
    "BaseTrainer": "class",
    "ComponentOf": "class",
    "Convert": "class",
    "Datasets": "class",
    "DistributedSetup": "class",
    "HpError": "class",
    "InputError": "class",
    "LossWrapper": "class",
    "MeshContext": "class",
    "ModelOutputLoss": "class",
    "ModelPlan": "class",
    "Origin": "class",
    "Problem": "class",
    "Recipe": "class",
    "Rename": "class",
    "ReplacementContext": "class",
    "RowDataset": "class",
    "Run": "class",
    "RunError": "class",
    "Target": "class",
    "Tokenizer": "class",
    "Tracker": "class",
    "TrainerConfig": "class",
    "finish_model": "(model: 'PreTrainedModel', distributed_setup: 'DistributedSetup', "
    "files: 'Sequence[str] | None' = None, *, peft_config: 'Any' = None, activation_checkpoint: 'Any' = None, "
    "activation_swap: 'Any' = None, compile_config: 'Any' = None) -> 'None'",
    "hookimpl": "HookimplMarker",
    "inner_wrapper": "(function: 'Function') -> 'Function'",
    "load_recipe": "(path: 'str | pathlib.Path', overrides: 'Sequence[str]' = (), *, "
    "components: 'Components | None' = None, env: 'Mapping[str, str] | None' = None) -> 'Recipe'",
    "local_compute": "(factory: 'Function') -> 'Function'",
    "model_config": "(values: 'Mapping[str, Any]', *, pretrained: 'str | None' = None, revision: 'str | None' = None, "
    "trust_remote_code: 'bool' = False, model_types: 'Collection[str] | None' = None, kind: 'str' = 'model') "
    "-> 'PreTrainedConfig'",
    "module_replacement": "(factory: 'Factory') -> 'Factory'",
    "plan_model": "(model: 'PreTrainedModel', sizes: 'ParallelSizes', overrides: 'Sequence[PlanOverride]' = (), "
    "settings: 'Settings | None' = None) -> 'ModelPlan'",
    "replace_modules": "(model: 'nn.Module', distributed_setup: 'DistributedSetup') -> 'tuple[Replaced, ...]'",
    "shard_model": "(model: 'nn.Module', setup: 'DistributedSetup') -> 'None'",
}

STAGES = [
    "_setup",
    "_build_model",
    "_build_loss",
    "_build_model_assets",
    "_build_data_transform",
    "_build_dataset",
    "_build_collate_fn",
    "_build_dataloader",
    "_build_get_batch",
    "_build_optimizer",
    "_build_lr_scheduler",
    "_restore",
]

LIGHT = (
    "hp_core",
    "hp_core.cli.main",
    "hp_core.components",
    "hp_core.config",
    "hp_core.config.json_schema",
    "hp_core.errors",
    "hp_core.hookspecs",
    "hp_core.plugins",
)


def shape(value: object) -> str:
    if inspect.isclass(value):
        return "class"
    return str(inspect.signature(value)) if inspect.isfunction(value) else type(value).__name__


def test_the_api_is_the_one_that_is_promised():
    assert {name: shape(getattr(hp_core, name)) for name in hp_core.__all__} == API
    assert set(dir(hp_core)) == set(API)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hp_core.nothing


def test_the_stages_run_in_their_order():
    source = inspect.getsource(hp_core.BaseTrainer.build)
    called = [line.strip().removeprefix("self.").removesuffix("()") for line in source.splitlines() if "self._" in line]
    assert called == STAGES
    for name in ("train", "train_step", "preforward", "forward", "postforward"):
        assert inspect.isfunction(getattr(hp_core.BaseTrainer, name))


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_import_neither_torch_nor_transformers(module):
    code = (
        f"import sys, {module}; heavy = {{'torch', 'transformers', 'datasets', 'numpy'}} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["plugins"], ["--version"]])
def test_light_commands_import_neither_torch_nor_transformers(arguments):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "hp_core", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "hp_core" in imported
    assert not {"torch", "transformers", "datasets"} & imported


# Recipes of packages need those packages: tests/examples installs them.
RECIPES = [
    path
    for name in ("recipe*.yaml", "train.yaml")
    for path in sorted((ROOT / "examples").rglob(name))
    if not (path.parent / "setup.cfg").exists()
]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_example_recipe_is_valid(path: Path):
    assert load_recipe(path).config.training.global_batch_size >= 1


def test_there_are_example_recipes():
    assert ROOT / "examples" / "quickstart" / "recipe.yaml" in RECIPES
