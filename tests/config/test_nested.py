"""Components among the arguments of a component."""

from __future__ import annotations

import copy
import pickle

import pytest

from hp_core.components import Component
from hp_core.config import Target
from hp_core.config.json_schema import component_schema
from hp_core.config.nested import ComponentOf
from hp_core.config.render import resolved_yaml
from hp_core.config.section import SECTIONS
from tests.config.conftest import MINIMAL, Workbench
from tests.config.losses import Around, CausalLm

AROUND = MINIMAL + "loss_fn: {_target_: tests.config.losses.Around"


def test_a_component_is_built_from_what_the_recipe_writes_inside_another(bench: Workbench) -> None:
    recipe = bench.load(AROUND + ", loss: {name: causal_lm, softcap: 30}, scale: 2}")
    outer = recipe.config.loss_fn
    assert outer is not None
    inner = outer.arguments["loss"]
    assert (inner.section, inner.group, inner.spelling) == ("loss_fn.loss", "hp.losses", "causal_lm")
    assert dict(inner.arguments) == {"softcap": 30.0}
    loss = outer.build()
    assert isinstance(loss, Around)
    assert isinstance(loss.loss, CausalLm)
    assert (loss.loss.softcap, loss.scale, loss.teacher) == (30.0, 2.0, None)
    assert recipe.config.targets()[-1] == inner


@pytest.mark.parametrize("written", ["causal_lm", "{name: causal_lm}", "parts:causal_lm"])
def test_a_bare_name_is_a_component_too(bench: Workbench, written: str) -> None:
    recipe = bench.load(AROUND + f", loss: {written}}}")
    assert recipe.config.loss_fn is not None
    assert isinstance(recipe.config.loss_fn.build().loss, CausalLm)


def test_components_are_nested_as_deep_as_one_likes(bench: Workbench) -> None:
    inner = "{_target_: tests.config.losses.Around, loss: {name: causal_lm, ignore_index: 0}}"
    recipe = bench.load(AROUND + f", loss: {inner}}}")
    assert recipe.config.loss_fn is not None
    assert recipe.config.loss_fn.build().loss.loss.ignore_index == 0
    assert [one.section for one in recipe.config.targets()[-2:]] == ["loss_fn.loss", "loss_fn.loss.loss"]


def test_a_component_of_another_kind_is_given_what_its_builder_provides(bench: Workbench) -> None:
    recipe = bench.load(AROUND + ", loss: causal_lm, teacher: {name: net, size: 3}}")
    assert recipe.config.loss_fn is not None
    teacher = recipe.config.loss_fn.build().teacher
    assert teacher.build(activation_checkpoint="full")["activation_checkpoint"] == "full"


@pytest.mark.parametrize(
    ("written", "line"),
    [
        ("loss: {name: causal_ml}", "loss_fn.loss.name: no loss_fn component is named 'causal_ml'; did you mean"),
        ("loss: {name: causal_lm, sofcap: 1}", "loss_fn.loss.sofcap: unknown argument of 'causal_lm'"),
        ("loss: {name: causal_lm, softcap: x}", "loss_fn.loss.softcap: expected a number, got the text 'x'"),
        ("loss: 3", "loss_fn.loss: expected a component, got the number '3'"),
        ("loss: null", "loss_fn.loss: expected a component, got null"),
        ("loss: {softcap: 1}", "loss_fn.loss: names no component"),
        ("scale: 1", "loss_fn: 'tests.config.losses.Around' needs the argument 'loss'"),
        ("loss: {_target_: tests.config.losses.not_a_loss}", "returns int, not a torch.nn.Module"),
        ("loss: causal_lm, teacher: {name: net, size: 1, distributed_setup: 1}", "is provided by the trainer"),
    ],
)
def test_what_is_wrong_inside_is_told_with_its_place(bench: Workbench, written: str, line: str) -> None:
    (error,) = bench.errors(AROUND + f", {written}}}")
    assert error.startswith("recipe.yaml:5:")
    assert line in error


def test_every_error_inside_and_outside_comes_together(bench: Workbench) -> None:
    errors = bench.errors(AROUND + ", loss: {name: causal_lm, sofcap: 1, ignore_index: x}, scael: 1}")
    assert len(errors) == 3


def test_one_argument_inside_is_overridden_alone(bench: Workbench) -> None:
    text = AROUND + ", loss: {name: causal_lm, softcap: 30, ignore_index: 0}}"
    recipe = bench.load(text, "--loss_fn.loss.softcap=50")
    assert recipe.config.loss_fn is not None
    assert dict(recipe.config.loss_fn.arguments["loss"].arguments) == {"softcap": 50.0, "ignore_index": 0}
    assert "softcap: 50" in resolved_yaml(recipe)


def test_a_nested_target_is_copied_and_pickled_with_the_one_around_it(bench: Workbench) -> None:
    target = bench.load(AROUND + ", loss: {name: causal_lm, softcap: 30}}").config.loss_fn
    for twin in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        assert twin == target
        assert isinstance(twin.arguments["loss"], Target)


def test_only_a_known_kind_can_be_asked_for() -> None:
    with pytest.raises(KeyError):
        ComponentOf("hp.lossess")


def test_the_schema_refers_to_the_components_of_the_kind() -> None:
    (section,) = [one for one in SECTIONS if one.group == "hp.losses"]
    component = Component("hp.losses", "around", "tests.config.losses:Around", "parts", "1.0")
    properties = component_schema(section, component)["properties"]
    assert properties["loss"] == {"$ref": "#/$defs/loss_fn", "not": {"type": "null"}}
    assert properties["teacher"] == {"$ref": "#/$defs/model", "default": None}
