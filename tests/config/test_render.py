"""The resolved recipe, differences, the JSON Schema and the reference."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_core.components import Component, Components
from hp_core.config.diff import differences
from hp_core.config.json_schema import recipe_schema
from hp_core.config.node import from_data, to_data
from hp_core.config.reader import read_yaml
from hp_core.config.reference import reference
from hp_core.config.render import inline_text, resolved_yaml, scalar_text
from hp_core.config.resolved import resolved_tree, to_shown_data
from hp_core.errors import Origin
from tests.config.conftest import COMPONENTS, MINIMAL, Workbench

RICH = """\
model: {name: net, size: 4, note: "yes"}
optimizer:
  name: adam
  lr: 1e-5
  betas: [0, 0.9]
  warmup: {steps: 3}
  table: {"a b": 1, "no": 2}
  free: [{a: [1, [2, {}]]}, "1e5", no, "a: b", "", null, "x\\ny", '#', 1.0, 1_000, "🙂\\u2028"]
dataset: {name: rows, path: "C:\\\\data", tokenizer: words}
dataloader: {num_workers: 2, collate_fn: pad}
loss_fn: {_target_: tests.config.losses.make_loss, scale: 3}
training: {train_epochs: 2, max_grad_norm: null}
trackers: [tracker, {name: tracker, project: "2024-01-01"}]
evaluation: {samples: {prompts: ["Once upon: a time", "010", " padded "]}}
plugins: []
"""


def test_resolved_recipe_loads_again_to_the_same(bench: Workbench) -> None:
    bench.write(RICH, "base.yaml")
    recipe = bench.load(
        "base: base.yaml\ntraining: {seed: 5}\n", "--optimizer.groups=[a, b]", "--optimizer.groups[0]=c"
    )
    for origins in (False, True):
        shown = resolved_yaml(recipe, origins=origins)
        again = bench.load(shown, name="again.yaml")
        assert again.config == recipe.config
        assert resolved_yaml(again) == resolved_yaml(recipe)


def test_origins_and_defaults_are_shown(bench: Workbench) -> None:
    recipe = bench.load(MINIMAL, "--training.seed=3")
    lines = bench.relative(resolved_yaml(recipe, origins=True).splitlines())
    assert "  train_iters: 10  # recipe.yaml:4:25" in lines
    assert "  seed: 3  # --training.seed=3" in lines
    assert "  micro_batch_size: 1  # default" in lines
    assert "  name: torch  # default" in lines
    assert "  # momentum: 0.0  # default" in lines
    assert "loss_fn: null  # default" in lines
    assert not [line for line in lines if "model" in line and "None" in line]


def test_every_section_is_in_the_resolved_recipe(bench: Workbench) -> None:
    data = to_shown_data(resolved_tree(bench.load(MINIMAL)))
    assert data["evaluation"]["samples"] == {"prompts": [], "max_new_tokens": 64, "temperature": 0.8, "seed": 0}
    assert data["dataset"] == {"name": "rows", "tokenizer": None}
    assert list(data)[:3] == ["plugins", "output_dir", "trainer"]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_categories=("Cs",)), max_size=10)
        | st.sampled_from(["no", "1e5", "~", "- a", "a: b", "x #y", "...", "0x1", "1_0", "null", ".inf", "a b", "<<"]),
        lambda below: st.lists(below, max_size=3),
        max_leaves=6,
    )
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_shown_value_reads_back(value: Any) -> None:
    text = inline_text(from_data(value))
    if text is not None:
        document = read_yaml(f"{scalar_text('key')}: {text}\n", lambda line, column: Origin())
        assert document.problems == ()
        assert document.root is not None
        assert repr(to_data(document.root)) == repr({"key": value})


@pytest.mark.parametrize(
    ("value", "text"), [(1e-5, "1.0e-05"), (1.5, "1.5"), ("on", '"on"'), ("a/b", "a/b"), (True, "true")]
)
def test_text_that_yaml_1_1_reads_in_the_same_way(value: Any, text: str) -> None:
    assert scalar_text(value) == text


def test_differences(bench: Workbench) -> None:
    left = bench.load(MINIMAL, name="left.yaml")
    text = MINIMAL.replace("name: sgd", "name: sgd, lr: 0.5").replace("10", "20") + "trackers: [tracker]\n"
    right = bench.load(text, "--training.seed=7", name="right.yaml")
    assert differences(left, left) == []
    assert bench.relative(differences(left, right)) == [
        "optimizer.lr: absent -> 0.5 (right.yaml:2:28)",
        "training.train_iters: 10 (left.yaml:4:25) -> 20 (right.yaml:4:25)",
        "training.seed: 42 (default) -> 7 (--training.seed=7)",
        "trackers[0].name: absent -> tracker (right.yaml:5:12)",
    ]


def test_schema_lists_components_with_their_arguments() -> None:
    broken = Component("hp.optimizers", "broken", "tests.config.nowhere:Thing", "acme", "2.0")
    schema = recipe_schema(Components([*COMPONENTS.all(), broken]))
    json.dumps(schema)
    definitions = schema["$defs"]
    adam = definitions["optimizer=parts:adam"]
    assert adam["additionalProperties"] is False
    assert "model" not in adam["properties"]
    assert adam["properties"]["mode"]["anyOf"][0]["enum"] == ["plain", "fused"]
    assert adam["properties"]["lr"]["default"] == 1e-3
    assert definitions["optimizer=acme:broken"]["properties"] == {"name": {"enum": ["broken", "acme:broken"]}}
    assert definitions["optimizer"]["anyOf"][0]["enum"] == [
        "adam",
        "parts:adam",
        "broken",
        "acme:broken",
        "sgd",
        "parts:sgd",
    ]
    assert set(schema["then"]["required"]) == {"model", "optimizer", "dataset", "training"}
    assert schema["additionalProperties"] is False
    names = set(references(schema))
    assert all(resolves(schema, name) for name in names)


def test_schema_completes_the_items_of_lists() -> None:
    schema = recipe_schema(COMPONENTS)
    definitions = schema["$defs"]
    for key, item in (("plan_overrides", "PlanOverride"), ("trackers", "trackers")):
        array, _, null = schema["properties"][key]["anyOf"]
        assert (array["items"]["$ref"], null) == (f"#/$defs/{item}", {"type": "null"})
    entry = definitions["PlanOverride"]
    assert entry["properties"]["replace_module"]["$ref"] == "#/$defs/plan_overrides.replace_module"
    actions = ["replace_module", "params", "in_src", "in_dst", "out_src", "out_dst", "inner_wrapper"]
    assert (entry["required"], entry["anyOf"][:-1]) == (["match"], [{"required": [action]} for action in actions])
    assert entry["properties"]["match"]["anyOf"][0] == {"type": "string", "minLength": 1}
    assert entry["additionalProperties"] is False
    choices = definitions["plan_overrides.replace_module"]["anyOf"]
    assert choices[0]["enum"] == ["fast_norm", "parts:fast_norm", "wrapped", "parts:wrapped"]
    assert {"type": "null"} not in choices
    norm = definitions["plan_overrides.replace_module=parts:fast_norm"]
    assert set(norm["properties"]) == {"name", "eps", "mode"}
    wrapped = {"$ref": "#/$defs/plan_overrides.replace_module=parts:wrapped", "required": ["name", "width"]}
    assert wrapped in choices
    assert not [name for name in definitions if name.endswith("over a base") and name.startswith(("plan", "track"))]


def references(schema: Any) -> list[str]:
    if isinstance(schema, dict):
        own = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
        return own + [one for value in schema.values() for one in references(value)]
    return [one for item in schema for one in references(item)] if isinstance(schema, list) else []


def resolves(schema: Any, reference: str) -> bool:
    for step in reference.removeprefix("#/").split("/"):
        if step not in schema:
            return False
        schema = schema[step]
    return True


def test_reference_names_every_key() -> None:
    text = reference(COMPONENTS)
    for words in (
        "| `train_iters` | integer ≥ 1 or null | `null` |",
        "### `evaluation.samples`",
        "## `dataset.tokenizer`",
        "## `plan_overrides.replace_module`",
        "| `match` | text or list of text | required |",
        "| `replace_module` | component or null | `null` |",
        "| `params` | mapping or `none` or null | `null` |",
        "| `out_src` | mapping of `tp`, `cp`, `ep` or `none` or null | `null` |",
    ):
        assert words in text
    assert "adam" not in text  # another distribution's
    assert text == reference(COMPONENTS)
