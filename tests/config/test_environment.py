"""`${env:NAME}`."""

from __future__ import annotations

import pytest

from hp_core.config.render import resolved_yaml
from tests.config.conftest import MINIMAL, Workbench


def optimizer_argument(bench: Workbench, written: str, **env: str) -> object:
    text = MINIMAL.replace("{name: sgd}", f"\n  name: adam\n  free: {written}")
    return bench.load(text, env=env).config.optimizer.arguments["free"]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("${env:N}", 5),
        ("${env:F}", 1e-5),
        ("${env:T}", "a b"),
        ("${env:L}", [1, "x"]),
        ("${env:EMPTY}", None),
        ("${env:NONE,7}", 7),
        ("${env:NONE, [1, 2]}", [1, 2]),
        ("${env:NONE,}", None),
        ("${env:NONE,${env:N}}", 5),
        ("runs/${env:N}/${env:T}", "runs/5/a b"),
        ("${env:N}${env:N}", "55"),
        ('"${env:N}"', "5"),
        ("!!str ${env:N}", "5"),
        ('["${env:N}"]', ["5"]),
        ("$env:N", "$env:N"),
    ],
)
def test_value(bench: Workbench, written: str, value: object) -> None:
    found = optimizer_argument(bench, written, N="5", F="1e-5", T="a b", L="[1, x]", EMPTY="")
    assert (found, type(found)) == (value, type(value))


def test_typed_sections(bench: Workbench) -> None:
    text = MINIMAL.replace("{train_iters: 10}", "\n  train_iters: ${env:N}\n  max_grad_norm: '${env:F}'")
    config = bench.load(text, "--training.seed=${env:S,3}", env={"N": "5", "F": "0.5"}).config
    assert (config.training.train_iters, config.training.max_grad_norm, config.training.seed) == (5, 0.5, 3)


def test_component_and_base_from_the_environment(bench: Workbench) -> None:
    bench.write(MINIMAL.replace("{name: sgd}", "{name: sgd, momentum: 0.5}"), "base.yaml")
    text = "base: ${env:B}.yaml\noptimizer: ${env:O,adam}\n"
    assert bench.load(text, env={"B": "base"}).config.optimizer.arguments == {}
    assert bench.load(text, env={"B": "base", "O": "sgd"}).config.optimizer.arguments == {"momentum": 0.5}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("${env:NONE}", "the environment variable 'NONE' is not set; set it, or write ${env:NONE,default}"),
        ("${env:1A}", "'1A' can't be the name of an environment variable; write ${env:NAME} or ${env:NAME,default}"),
        ("${env:N", "'${env:' has no closing brace; write ${env:NAME} or ${env:NAME,default}"),
        (
            "${env:BAD}",
            "the value of '${env:BAD}' is not one YAML value; put the expression in quotes to take it as text",
        ),
        (
            "${env:MAP}",
            "the value of '${env:MAP}' is a mapping or holds one; a variable gives a scalar or a list of scalars",
        ),
        ("${env:WORD}", "expected a number, got the value of '${env:WORD}'"),
        ("${env:LIST}", "expected a number, got the value of '${env:LIST}'"),
        ("${env:MINUS}", "must be greater than 0.0, got the value of '${env:MINUS}'"),
    ],
)
def test_faults_never_show_values(bench: Workbench, written: str, message: str) -> None:
    env = {"N": "5", "BAD": "hush: hush", "MAP": "{hush: 1}", "WORD": "hush", "LIST": "[hush]", "MINUS": "-777"}
    text = MINIMAL.replace("{train_iters: 10}", f"\n  train_iters: 10\n  max_grad_norm: {written}")
    assert bench.errors(text, env=env) == [f"recipe.yaml:6:18: training.max_grad_norm: {message}"]


def test_names_and_modules_from_the_environment_are_not_shown(bench: Workbench) -> None:
    for key in ("name", "_target_"):
        text = MINIMAL.replace("{name: sgd}", f"\n  {key}: ${{env:SECRET}}")
        (line,) = bench.errors(text, env={"SECRET": "hush.hush"})
        assert "hush" not in line
        assert "${env:SECRET}" in line


def test_an_unset_variable_counts_only_where_it_is_used(bench: Workbench) -> None:
    bench.write(f"{MINIMAL}output_dir: ${{env:NONE}}\n", "base.yaml")
    assert bench.load("base: base.yaml\noutput_dir: here\n").config.output_dir == "here"
    assert bench.load("base: base.yaml\n", "--output_dir=there").config.output_dir == "there"


def test_resolved_recipe_keeps_expressions(bench: Workbench) -> None:
    text = f'{MINIMAL}output_dir: runs/${{env:SECRET}}\nplugins: ${{env:LIST}}\nlaunch: {{timeout: "${{env:TIME}}"}}\n'
    env = {"SECRET": "hush", "LIST": "[hush]", "TIME": "77"}
    recipe = bench.load(text, env=env)
    for origins in (False, True):
        shown = resolved_yaml(recipe, origins=origins)
        assert "hush" not in shown
        assert "77" not in shown
        assert bench.load(shown, env=env, name="again.yaml").config == recipe.config
    assert "hush" not in repr(recipe.config.model)
