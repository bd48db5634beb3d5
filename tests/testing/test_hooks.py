"""Each check of a hook plugin catches one that breaks its promise, and lets pass those that keep all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hp_core.hooks import hooks
from hp_core.testing import TINY_RECIPE, hook_checks
from hp_core.testing.checks import BrokenPromiseError, Check
from hp_core.testing.hooks import HookChecks
from hp_core.testing.recording import argument_faults, result_fault
from tests.testing import broken_plugins as broken
from tests.testing.caught import failures


@hook_checks(broken.everything)
def test_a_plugin_with_every_hook_keeps_every_promise(check: Check) -> None:
    check()


def test_it_has_every_hook() -> None:
    assert {name for name in hooks() if hasattr(broken.Everything, name)} == set(hooks())


@hook_checks("tests.testing.broken_plugins:watches")
def test_a_plugin_can_be_named_by_its_path(check: Check) -> None:
    check()


@pytest.mark.parametrize("listed", [False, True])
def test_a_plugin_can_be_a_file_that_the_recipe_may_list(tmp_path: Path, listed: bool) -> None:
    path = tmp_path / "watch.py"
    path.write_text("from hp_core import hookimpl\n@hookimpl\ndef on_train_end(report):\n    print(report.steps)\n")
    recipe = f"{TINY_RECIPE}plugins: [{path}]\n" if listed else None
    assert failures(HookChecks(str(path), recipe).checks()) == {}


NO_VALIDATION = TINY_RECIPE.replace("  validation_rows: 2\n", "").replace("evaluation: {every: 2}\n", "")

# The plugin, its recipe, the checks that catch it, and a part of what the first of them says.
CAUGHT = [
    (broken.RefusesThePlan, None, ["called", "runs"], "on_step_end: never called; the run ended before"),
    (broken.Replaces, TINY_RECIPE, ["called"], "replace_module: never called; give a recipe in which they are"),
    (broken.WritesEvaluation, NO_VALIDATION, ["called"], "on_evaluate: never called"),
    (broken.BuildsText, None, ["results", "runs"], "build_loss returned a str, not a torch.nn.Module"),
    (broken.BuildsParameters, None, ["results", "runs"], "build_optimizer returned a list, not a torch.optim"),
    (broken.PreparesPairs, None, ["results", "runs"], "prepare_model_inputs returned a list, not the dict"),
    (broken.BuildsRows, None, ["results", "runs"], "build_dataset returned no data set"),
    (broken.WritesEvaluation, None, ["arguments"], "on_evaluate: it adds 'evaluation.perplexity'"),
    (broken.WritesMetrics, None, ["arguments"], "on_step_end: it changes run.metrics, which is read-only"),
    (broken.CountsForItself, None, ["arguments"], "on_step_end: it changes run.state, which is read-only"),
    (broken.NudgesWeights, None, ["arguments"], "it changes the weight lm_head.weight of run.model"),
    (broken.SwapsRows, None, ["arguments"], "it changes the weight model.embed_tokens.weight of run.model"),
    (broken.ClearsTheHead, None, ["arguments"], "bind_model: it changes the weight lm_head.weight of model"),
    (broken.Reseeds, None, ["arguments"], "on_step_end: it changes the random numbers of the run"),
    (broken.Freezes, None, ["arguments"], "on_train_start: it changes requires_grad in run.model"),
    (broken.DropsLabels, None, ["arguments", "runs"], "prepare_model_inputs: it removes 'model_inputs.use_cache'"),
    (broken.MasksTokens, None, ["arguments", "runs"], "prepare_model_inputs: it writes into 'loss_inputs.labels'"),
    (broken.Stumbles, None, ["runs"], "on_train_end raised KeyError"),
]


@pytest.mark.parametrize(("kind", "recipe", "names", "text"), CAUGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_promise_is_caught_by_its_own_check(kind: Any, recipe: Any, names: list[str], text: str) -> None:
    found = failures(HookChecks(kind(), recipe).checks())
    assert set(found) == set(names), found
    assert f"{kind.__name__} breaks {names[0]!r}" in found[names[0]]
    assert text in found[names[0]]


@pytest.mark.parametrize(
    ("plugin", "text"),
    [
        (broken.Misspelt(), "the hookimpl 'on_step_ends' is no hook of hyperparallel"),
        (broken.Undecorated(), "the function 'on_train_end' is named like a hook but isn't decorated"),
        (broken.AsksForMore(), "takes 'loss', which hyperparallel"),
        (broken.ForAnotherVersion(), "needs hyperparallel >=99"),
        (object(), "has no hookimpl"),
        (broken.Watches, "is a class"),
        ("no_such_package.plugin", "no plugin 'no_such_package.plugin': ModuleNotFoundError"),
        ("tests.testing.broken_plugins:nothing", "has no attribute 'nothing'"),
        ("./nothing.py", "there is no file"),
    ],
)
def test_what_is_no_plugin_is_told_by_the_first_check(plugin: object, text: str) -> None:
    (check, *_) = HookChecks(plugin).checks()
    with pytest.raises(BrokenPromiseError, match="breaks 'loads'") as caught:
        check()
    assert text in str(caught.value)


def test_arguments_that_are_not_as_the_manual_says_are_told() -> None:
    hook = hooks()["on_evaluate"]
    assert argument_faults(hook, {"run": None, "evaluation": {"step": 1, "eval_loss": 2.0}}) == [
        "on_evaluate: run is a NoneType; the manual says Run",
        "on_evaluate: evaluation has no 'eval_tokens', which the manual names",
    ]


@pytest.mark.parametrize("name", ["build_model", "replace_module", "build_lr_scheduler", "build_dataloader"])
def test_results_of_another_kind_are_told(name: str) -> None:
    assert (result_fault(name, 3) or "").startswith("a int, ")


def test_every_check_catches_something() -> None:
    """Those that the other tests above are for, and those that their table names first."""
    first = {names[0] for *_, names, _ in CAUGHT}
    assert first | {"loads"} == {check.name for check in HookChecks(broken.watches).checks()}
