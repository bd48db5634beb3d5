"""Command-line overrides."""

from __future__ import annotations

import itertools
import shlex
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hp_core.config.node import to_data
from hp_core.config.override import parse_overrides
from hp_core.config.reader import read_yaml
from hp_core.config.value import ValueSyntaxError, quote, read_value
from hp_core.errors import Origin
from tests.config.conftest import MINIMAL, Workbench


def value_of(text: str) -> Any:
    (override,), problems = parse_overrides([f"--a={text}"], {})
    assert problems == []
    assert getattr(override.node, "problem", None) is None
    return to_data(override.node)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None),
        ("", None),
        ('""', ""),
        ('"null"', "null"),
        ('"true"', "true"),
        ("true", True),
        ('"1e5"', "1e5"),
        ("1e5", 1e5),
        ("2e-5", 2e-5),
        ("010", 10),
        ('"[a]"', "[a]"),
        ("[a]", ["a"]),
        ("[a, b c]", ["a", "b c"]),
        ("[]", []),
        ("{a: 1, b: [x]}", {"a": 1, "b": ["x"]}),
        ('"a: b"', "a: b"),
        ("/data/a=b/c.txt", "/data/a=b/c.txt"),
        ("user@host", "user@host"),
        ("50%", "50%"),
        ("a#b", "a#b"),
        ('"#"', "#"),
        ("🙂", "🙂"),
        ("no", "no"),
        ("None", "None"),
        ("a b  ", "a b"),
        ("'it''s'", "it's"),
        ("http://x/y?z=1&w=2", "http://x/y?z=1&w=2"),
    ],
)
def test_value_is_typed_as_in_yaml(text: str, value: object) -> None:
    found = value_of(text)
    assert (found, type(found)) == (value, type(value))
    document = read_yaml(f"a: {text}\n", lambda line, column: Origin())
    assert document.root is not None
    assert to_data(document.root) == {"a": value}


@pytest.mark.parametrize(
    "text",
    [
        "a #b",
        "#b",
        "@x",
        "%x",
        "`x`",
        "a: b",
        "a:",
        "*x",
        "&x y",
        "!x y",
        "|",
        "> a",
        "- a",
        "[a",
        "'a",
        "a\nb: c",
        "a\x00",
    ],
)
def test_text_that_yaml_refuses_or_cuts_is_refused_with_the_quoting_that_works(text: str) -> None:
    (override,), _ = parse_overrides([f"--a.b={text}"], {})
    problem = override.node.problem  # type: ignore[union-attr]
    assert problem is not None
    assert problem.hint.startswith("write --a.b=")
    (typed,) = shlex.split(problem.hint.removeprefix("write ").removesuffix(" to give this text"))
    assert value_of(typed.removeprefix("--a.b=")) == text


def json_values() -> st.SearchStrategy[Any]:
    texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
    return st.recursive(scalars, lambda below: st.lists(below, max_size=3) | st.dictionaries(texts, below, max_size=3))


def flow(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{quote(key)}: {flow(below)}' for key, below in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(flow, value))}]"
    if isinstance(value, str):
        return quote(value)
    return (
        {None: "null", True: "true", False: "false"}[value]
        if value is None or value is True or value is False
        else repr(value)
    )


@given(json_values())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_value_written_in_yaml_equals_its_override(value: Any) -> None:
    text = flow(value)
    document = read_yaml(f"a: {text}\n", lambda line, column: Origin())
    assert document.root is not None
    assert repr(to_data(document.root)) == repr({"a": value})
    assert repr(value_of(text)) == repr(value)


@given(st.text(st.sampled_from("ab1e-_ .:#@%&*!|>'\"[]{},?=\\~`\n\t"), max_size=8))
@settings(max_examples=300, deadline=None)
def test_unquoted_text_is_never_cut(text: str) -> None:
    try:
        node = read_value(text, Origin())
    except ValueSyntaxError:
        return
    document = read_yaml(f"a: {text}\n", lambda line, column: Origin())
    assert document.root is not None
    assert document.problems == ()
    assert repr(to_data(document.root)) == repr({"a": to_data(node)})
    if isinstance(to_data(node), str) and not set(text) & set("'\"\\!\n"):
        assert to_data(node) == text.strip()


def test_order_does_not_matter(bench: Workbench) -> None:
    options = [
        "--optimizer={name: sgd, lr: 1.0}",
        "--optimizer.name=adam",
        "--optimizer.groups=[a, b]",
        "--optimizer.groups[1]=c",
    ]
    configs = [bench.load(MINIMAL, *order).config for order in itertools.permutations(options)]
    assert all(config == configs[0] for config in configs)
    assert configs[0].optimizer.name == "adam"
    assert configs[0].optimizer.arguments == {"groups": ["a", "c"]}


def test_one_field_leaves_its_siblings_alone(bench: Workbench) -> None:
    text = MINIMAL.replace("{train_iters: 10}", "{train_iters: 10, seed: 321}")
    training = bench.load(text, "--training.train_iters=9").config.training
    assert (training.train_iters, training.seed) == (9, 321)


@pytest.mark.parametrize(
    "option", ["--optimizer.name=sgd", "--optimizer=sgd", "--optimizer._target_=tests.config.parts.Sgd"]
)
def test_another_component_drops_the_old_arguments(bench: Workbench, option: str) -> None:
    text = MINIMAL.replace("{name: sgd}", "{name: adam, betas: [0.1, 0.2], lr: 0.5}")
    optimizer = bench.load(text, option, "--optimizer.momentum=0.9").config.optimizer
    assert optimizer.arguments == {"momentum": 0.9}


def test_the_same_component_keeps_its_arguments(bench: Workbench) -> None:
    text = MINIMAL.replace("{name: sgd}", "{name: sgd, momentum: 0.5}")
    for option in ("--optimizer.name=sgd", "--optimizer=sgd", "--optimizer.name=parts:sgd"):
        assert bench.load(text, option).config.optimizer.arguments == {"momentum": 0.5}


def test_another_dataset_keeps_the_tokenizer(bench: Workbench) -> None:
    text = MINIMAL.replace("{name: rows}", "{name: rows, limit: 3, tokenizer: {name: words, vocabulary: 7}}")
    dataset = bench.load(text, "--dataset.name=other_rows").config.dataset
    assert dataset.source.arguments == {}
    assert dataset.tokenizer is not None
    assert dataset.tokenizer.arguments == {"vocabulary": 7}


def test_list_items_and_new_sections(bench: Workbench) -> None:
    text = MINIMAL + "trackers: [tracker, {name: tracker, project: a}]\nloss_fn: null\n"
    options = (
        "--trackers[1].project=b",
        "--trackers[0].project=c",
        "--evaluation.samples.seed=5",
        "--lr_scheduler.name=anything",
    )
    config = bench.load(text, *options).config
    assert [tracker.arguments["project"] for tracker in config.trackers] == ["c", "b"]
    assert config.evaluation.samples.seed == 5
    assert config.lr_scheduler is not None


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--training.train_itres=3", "training.train_itres: unknown key; did you mean 'train_iters'?"),
        ("--trainig.seed=3", "trainig: unknown key; did you mean 'training'?"),
        (
            "--optimizer.momentun=3",
            "optimizer.momentun: unknown argument of 'sgd'; did you mean 'momentum'? accepted: lr, momentum",
        ),
        ("--evaluation.samples.sed=3", "evaluation.samples.sed: unknown key; did you mean 'seed'?"),
        ("--training.seed.x=1", "training.seed.x: training.seed is a value, not a section"),
        ("--trackers[0].name=x", "trackers[0]: trackers has 0 items; the first is [0]"),
        ("--training[0]=x", "training[0]: training is not a list"),
        ("--training.seed=true", "training.seed: expected an integer, got the boolean 'true'"),
        ("--training.seed=None", "training.seed: expected an integer, got the text 'None'; nothing is written null"),
        ("--plugins=a", "plugins: expected a list, got the text 'a'; write [a]"),
        ("--output_dir=010", "output_dir: expected text, got the number '010'; write --output_dir='\"010\"'"),
        ("--training.seed", "is not an override; write --section.key=value"),
        ("--=3", "is not an override; write --section.key=value"),
        ("--a..b=3", "is not an override; write --section.key=value"),
    ],
)
def test_refused(bench: Workbench, option: str, line: str) -> None:
    text = MINIMAL.replace("{train_iters: 10}", "{train_iters: 10, seed: 3}")
    assert bench.errors(text, option) == [f"{option}: {line}"]


def test_conflicting_values_for_one_path(bench: Workbench) -> None:
    assert bench.errors(MINIMAL, "--training.seed=1", "--training.seed=2") == [
        "--training.seed=2: training.seed: given twice, first as --training.seed=1; leave one of them out"
    ]
    assert bench.load(MINIMAL, "--training.seed=1", "--training.seed=1").config.training.seed == 1


def test_name_and_import_path_together(bench: Workbench) -> None:
    lines = bench.errors(MINIMAL, "--optimizer.name=adam", "--optimizer._target_=tests.config.parts.Sgd")
    assert len(lines) == 1
    assert "'name' and '_target_' each name a component" in lines[0]


def test_quoted_key(bench: Workbench) -> None:
    config = bench.load(MINIMAL, "--optimizer.name=adam", '--optimizer.table."a.b"=2').config
    assert config.optimizer.arguments["table"] == {"a.b": 2.0}
