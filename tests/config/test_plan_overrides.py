"""The entries of `plan_overrides`: what they mean, and every way to get them wrong."""

from __future__ import annotations

import itertools
import pickle

import pytest

from hp_core.config.diff import differences
from hp_core.config.digest import digests
from hp_core.config.importing import import_module_type
from hp_core.config.plan_override import AxisPlacements, PlanOverride
from hp_core.config.render import resolved_yaml
from hp_core.config.resolved import resolved_tree, to_shown_data
from hp_core.errors import InputError
from tests.config import replacements
from tests.config.conftest import MINIMAL, REPLACEMENTS, Workbench

MODELING = "transformers.models.llama.modeling_llama"
ENTRIES = f"""\
plan_overrides:
  - match: "*norm"
    replace_module: fast_norm
  - match: [a.*, b]
    when: tp
    module_type: torch.nn.Linear
    exact_type: true
    replace_module: {{_target_: {REPLACEMENTS}.Wrapped, width: 3}}
"""
FULL = MINIMAL + ENTRIES


def entries(bench: Workbench, text: str, *overrides: str) -> list[PlanOverride]:
    return bench.load(MINIMAL + text, *overrides).config.plan_overrides


def faults(bench: Workbench, entry: str) -> list[str]:
    """Return what is wrong with one entry, written as a flow mapping on line 6, without file and line."""
    lines = bench.errors(f"{MINIMAL}plan_overrides:\n- {entry}\n")
    assert all(line.startswith("recipe.yaml:6:") for line in lines)
    return [line.removeprefix("recipe.yaml:6:") for line in lines]


def test_entries(bench: Workbench) -> None:
    config = bench.load(FULL).config
    first, second = config.plan_overrides
    assert (first.match, first.when, first.module_type, first.exact_type) == (("*norm",), None, None, False)
    assert (second.match, second.when, second.exact_type) == (("a.*", "b"), "tp", True)
    assert second.module_type == "torch.nn.Linear"
    assert first.replace_module is not None
    assert (first.replace_module.section, first.replace_module.group) == (
        "plan_overrides[0].replace_module",
        "hp.module_replacements",
    )
    assert first.replace_module.load() is replacements.fast_norm
    assert second.replace_module is not None
    assert second.replace_module.arguments == {"width": 3}
    assert second.replace_module.build(module=None, module_fqn="a.b", context=None).made_from == ("a.b", 3)
    assert config.targets()[-2:] == (first.replace_module, second.replace_module)
    assert pickle.loads(pickle.dumps(config)) == config


def test_spellings_are_alike(bench: Workbench) -> None:
    spellings = (
        "{match: a, replace_module: fast_norm}",
        "{match: [a], replace_module: {name: fast_norm}}",
        "{match: a, when: null, module_type: null, exact_type: false, replace_module: {name: fast_norm}}",
        "{match: a, params: null, out_src: null, replace_module: fast_norm}",
    )
    loaded = [entries(bench, f"plan_overrides: [{one}]\n") for one in spellings]
    assert all(one == loaded[0] for one in loaded)
    direct = PlanOverride(match="a", replace_module=loaded[0][0].replace_module)  # type: ignore[arg-type]
    assert direct == loaded[0][0]


def test_a_contract(bench: Workbench) -> None:
    (entry,) = entries(
        bench,
        """\
plan_overrides:
- match: "*.mlp"
  params: {up.weight: {tp: shard(0)}, down.weight: {tp: shard(-1), ep: replicate}}
  in_dst: none
  out_src: {tp: partial}
  out_dst: {}
""",
    )
    assert entry.params == {
        "up.weight": AxisPlacements(tp="shard(0)"),
        "down.weight": AxisPlacements(tp="shard(-1)", ep="replicate"),
    }
    assert (entry.in_src, entry.in_dst) == (None, {})
    assert (entry.out_src, entry.out_dst) == (AxisPlacements(tp="partial"), AxisPlacements())
    assert entry.has_contract


@pytest.mark.parametrize(
    ("contract", "lines"),
    [
        (
            "params: {w: {dp: shard(0)}}",
            ["27: plan_overrides[0].params.w.dp: unknown key; known keys: cp, ep, tp"],
        ),
        ("out_src: {fsdp: shard(0)}", ["24: plan_overrides[0].out_src.fsdp: unknown key; known keys: cp, ep, tp"]),
        (
            "out_src: {tp: shard, cp: shard(x)}",
            [
                "28: plan_overrides[0].out_src.tp: expected replicate, partial or shard(N), got 'shard'",
                "39: plan_overrides[0].out_src.cp: expected replicate, partial or shard(N), got 'shard(x)'",
            ],
        ),
        ("in_dst: {x: shard(1)}", ["26: plan_overrides[0].in_dst.x: expected a mapping, got the text 'shard(1)'"]),
        ("params: whole", ["22: plan_overrides[0].params: expected a mapping, got the text 'whole'"]),
        ("out_dst: {tp: 1}", ["28: plan_overrides[0].out_dst.tp: expected text, got the number '1'; write \"1\""]),
        (
            f"inner_wrapper: {{_target_: {REPLACEMENTS}.fast_norm}}",
            [
                f"40: plan_overrides[0].inner_wrapper._target_: '{REPLACEMENTS}.fast_norm' is no inner wrapper; "
                "decorate it with @hp_core.inner_wrapper"
            ],
        ),
        (
            f"local_compute_fn: {{_target_: {REPLACEMENTS}.plain_function}}",
            [
                f"43: plan_overrides[0].local_compute_fn._target_: '{REPLACEMENTS}.plain_function' is no local "
                "computation; decorate it with @hp_core.local_compute"
            ],
        ),
    ],
)
def test_faulty_contract(bench: Workbench, contract: str, lines: list[str]) -> None:
    assert faults(bench, f"{{match: a, {contract}}}") == lines


def test_classmethods_and_qualified_names_are_found(bench: Workbench) -> None:
    text = f"plan_overrides:\n- {{match: a, replace_module: {{_target_: {REPLACEMENTS}.Factories.made}}}}\n"
    assert len(entries(bench, text)) == 1
    (entry,) = entries(bench, "plan_overrides:\n- {match: a, replace_module: 'parts:fast_norm'}\n")
    assert entry.replace_module is not None
    assert entry.replace_module.component is not None


INSTALLED = "installed: fast_norm, wrapped"
NOTHING = (
    "3: plan_overrides[0]: does nothing; write replace_module, params, in_src, in_dst, out_src, out_dst, "
    "inner_wrapper or local_compute_fn"
)


@pytest.mark.parametrize(
    ("entry", "lines"),
    [
        (
            "{}",
            [
                "3: plan_overrides[0].match: required key is missing",
                NOTHING,
            ],
        ),
        ("", ["2: plan_overrides[0]: expected a mapping, got null"]),
        ("text", ["3: plan_overrides[0]: expected a mapping, got the text 'text'"]),
        ("[a]", ["3: plan_overrides[0]: expected a mapping, got a list"]),
        ("{match: a}", [NOTHING]),
        ("{match: a, replace_module: null}", [NOTHING]),
        ("{replace_module: fast_norm}", ["3: plan_overrides[0].match: required key is missing"]),
        ("{match: [], replace_module: fast_norm}", ["11: plan_overrides[0].match: must not be empty"]),
        ("{match: '', replace_module: fast_norm}", ["11: plan_overrides[0].match: must not be empty"]),
        ("{match: [a, ''], replace_module: fast_norm}", ["15: plan_overrides[0].match[1]: must not be empty"]),
        (
            "{match: 3, replace_module: fast_norm}",
            ["11: plan_overrides[0].match: expected text or a list of text, got the number '3'"],
        ),
        (
            "{match: [a, 3], replace_module: fast_norm}",
            ["15: plan_overrides[0].match[1]: expected text, got the number '3'; write \"3\""],
        ),
        (
            "{match: [a, b, a, a], replace_module: fast_norm}",
            [
                "18: plan_overrides[0].match[2]: repeats match[0], 'a'; remove one of them",
                "21: plan_overrides[0].match[3]: repeats match[0], 'a'; remove one of them",
            ],
        ),
        (
            "{match: a, when: tpp, replace_module: fast_norm}",
            [
                "20: plan_overrides[0].when: expected 'dp', 'tp', 'cp', 'ep' or 'pp', got the text 'tpp'; "
                "did you mean 'tp'?"
            ],
        ),
        (
            "{match: a, exact_type: true, replace_module: fast_norm}",
            [
                "14: plan_overrides[0].exact_type: needs module_type, the type that is meant; "
                "write it, or remove exact_type"
            ],
        ),
        (
            "{match: a, exact_type: yes, module_typ: torch.nn.Linear, replace_module: fast_norm}",
            [
                "26: plan_overrides[0].exact_type: expected true or false, got the text 'yes'; write true",
                "31: plan_overrides[0].module_typ: unknown key; did you mean 'module_type'?",
            ],
        ),
        ("{match: a, replace_modul: fast_norm}", ["14: plan_overrides[0].replace_modul: unknown key; did you mean "]),
        (
            "{match: a, replace_module: fast_norm, eps: 1}",
            ["41: plan_overrides[0].eps: unknown key; known keys: exact_type, in_dst, in_src, inner_wrapper, "],
        ),
        (
            "{match: a, inner_wrapper: ring, in_src: {x: 1}}",
            [
                "29: plan_overrides[0].inner_wrapper.name: no plan_overrides.inner_wrapper component is named 'ring'; ",
                "47: plan_overrides[0].in_src.x: expected a mapping, got the number '1'",
            ],
        ),
        (
            "{match: a, replace_module: 3}",
            [
                "30: plan_overrides[0].replace_module: expected a component, got the number '3'; write its name, "
                "or a mapping with 'name'"
            ],
        ),
        (
            "{match: a, replace_module: fast_nrom}",
            [
                "30: plan_overrides[0].replace_module.name: no plan_overrides.replace_module component is named "
                f"'fast_nrom'; did you mean 'fast_norm'? {INSTALLED}"
            ],
        ),
        (
            "{match: a, replace_module: {eps: 1}}",
            [
                f"14: plan_overrides[0].replace_module: names no component; write 'name:' ({INSTALLED}) or "
                "'_target_: package.module.attribute'"
            ],
        ),
        (
            "{match: a, replace_module: {name: fast_norm, eps: x, mode: fusd, context: 1, module: 1, module_fqn: 1}}",
            [
                "53: plan_overrides[0].replace_module.eps: expected a number, got the text 'x'",
                "62: plan_overrides[0].replace_module.mode: expected 'plain' or 'fused', got the text 'fusd'; "
                "did you mean 'fused'?",
                "68: plan_overrides[0].replace_module.context: is provided by the trainer; remove it",
                "80: plan_overrides[0].replace_module.module: is provided by the trainer; remove it",
                "91: plan_overrides[0].replace_module.module_fqn: is provided by the trainer; remove it",
            ],
        ),
        (
            "{match: a, replace_module: {name: fast_norm, epz: 1}}",
            [
                "48: plan_overrides[0].replace_module.epz: unknown argument of 'fast_norm'; did you mean 'eps'? "
                "accepted: eps, mode"
            ],
        ),
        (
            "{match: a, replace_module: wrapped}",
            ["14: plan_overrides[0].replace_module: 'wrapped' needs the argument 'width'; write 'width: …' in this"],
        ),
    ],
)
def test_faulty_entry(bench: Workbench, entry: str, lines: list[str]) -> None:
    found = faults(bench, entry)
    assert len(found) == len(lines)
    assert all(line.startswith(expected) for line, expected in zip(found, lines, strict=True)), found


@pytest.mark.parametrize("name", ["plain_function", "Unmarked"])
def test_factory_without_a_mark(bench: Workbench, name: str) -> None:
    path = f"{REPLACEMENTS}.{name}"
    found = faults(bench, f"{{match: a, replace_module: {{_target_: {path}, width: 1}}}}")
    assert found[0] == (
        f"41: plan_overrides[0].replace_module._target_: '{path}' is no module replacement; "
        "decorate it with @hp_core.module_replacement"
    )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            f"{MODELING}.LlamaRMSNrom",
            f"the module '{MODELING}' has no 'LlamaRMSNrom'; did you mean 'LlamaRMSNorm'?",
        ),
        (f"{MODELING}.Norm", f"the module '{MODELING}' has no 'Norm'; its classes: LlamaRMSNorm, Llama"),
        (
            "transformers.models.llama.LlamaRMSNorm",
            "the module 'transformers.models.llama' has no 'LlamaRMSNorm'; its modules: configuration_llama, ",
        ),
        (
            "transformers.models.llama.modelling_llama.LlamaRMSNorm",
            "the module 'transformers.models.llama' has no 'modelling_llama'; did you mean 'modeling_llama'?",
        ),
        ("torch.nn.Linaer", "the module 'torch.nn' has no 'Linaer'; did you mean 'Linear'?"),
        (
            "tests.config.losses",
            "'tests.config.losses' is a Python module, not a class; name one of its classes: CausalLm",
        ),
        ("torch.nn.functional.relu", "'torch.nn.functional.relu' is not a torch.nn.Module class; name the class of"),
        ("tests.config.parts.Sgd", "'tests.config.parts.Sgd' is not a torch.nn.Module class; name the class of"),
        ("pathlib.Path", "'pathlib.Path' is from the standard library"),
        ("Linear", "'Linear' is not a dotted path; write package.module.name"),
        ("None", "'None' is not a dotted path; nothing is written null"),
        ("''", "'' is not a dotted path"),
        ("nowhere.Linear", "'nowhere.Linear' can't be imported: no module named 'nowhere'; install its package"),
    ],
)
def test_faulty_module_type(bench: Workbench, path: str, message: str) -> None:
    (line,) = faults(bench, f"{{match: a, module_type: {path}, replace_module: fast_norm}}")
    assert line.startswith(f"27: plan_overrides[0].module_type: {message}")


def test_module_type_is_the_class() -> None:
    assert import_module_type("tests.config.replacements.Wrapped") is replacements.Wrapped
    assert import_module_type("transformers.LlamaForCausalLM").__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("plan_overrides: {match: a}\n", "5:17: plan_overrides: expected a list, got a mapping; begin each item with "),
        ("plan_overrides: 3\n", "5:17: plan_overrides: expected a list, got the number '3'"),
        ("replace_module: fast_norm\n", "5:1: replace_module: unknown key; did you mean 'plan_overrides[0].replace_m"),
    ],
)
def test_entries_in_a_wrong_place(bench: Workbench, text: str, line: str) -> None:
    (found,) = bench.errors(MINIMAL + text)
    assert found.startswith(f"recipe.yaml:{line}")


def test_the_faults_of_every_entry_come_together_with_those_of_the_recipe(bench: Workbench) -> None:
    text = """\
    plan_overrides:
      - match: a
      - {match: [b, b], replace_module: {name: fast_norm, eps: x}}
      - {match: c, exact_type: true, module_type: tests.config.losses.NotALoss, replace_module: nothing}
    training: {train_itres: 3}
    """
    lines = bench.errors(text)
    assert [line.split(": ")[1] for line in lines] == [
        "model",
        "optimizer",
        "dataset",
        "plan_overrides[0]",
        "plan_overrides[1].match[1]",
        "plan_overrides[1].replace_module.eps",
        "plan_overrides[2].module_type",
        "plan_overrides[2].replace_module.name",
        "training.train_itres",
    ]


def test_refusal_of_a_factory_is_located(bench: Workbench) -> None:
    (entry,) = entries(bench, "plan_overrides:\n- match: a\n  replace_module: {name: fast_norm, eps: 0.5}\n")
    assert entry.replace_module is not None
    with pytest.raises(InputError) as caught:
        entry.replace_module.build(module=None, module_fqn="a", context=None)
    assert bench.relative([str(caught.value)]) == [
        "recipe.yaml:7:42: plan_overrides[0].replace_module.eps: is too large; write 1e-5"
    ]


def test_overrides_reach_into_entries(bench: Workbench) -> None:
    options = [
        "--plan_overrides[1].exact_type=false",
        "--plan_overrides[0].replace_module.eps=1e-5",
        "--plan_overrides[0].match=[x, y]",
        "--plan_overrides[1].replace_module=fast_norm",
        "--plan_overrides[1].replace_module.mode=fused",
    ]
    configs = [bench.load(FULL, *order).config for order in itertools.permutations(options)]
    assert all(config == configs[0] for config in configs)
    first, second = configs[0].plan_overrides
    assert first.match == ("x", "y")
    assert first.replace_module is not None
    assert first.replace_module.arguments == {"eps": 1e-5}
    assert second.exact_type is False
    assert second.module_type == "torch.nn.Linear"
    assert second.replace_module is not None
    assert (second.replace_module.name, second.replace_module.arguments) == ("fast_norm", {"mode": "fused"})


def test_entries_from_the_command_line(bench: Workbench) -> None:
    option = "--plan_overrides=[{match: a, replace_module: fast_norm}]"
    (entry,) = entries(bench, "", option, "--plan_overrides[0].replace_module.eps=2")
    assert entry.replace_module is not None
    assert entry.replace_module.arguments == {"eps": 2.0}
    assert entries(bench, ENTRIES, "--plan_overrides=null") == []
    assert bench.errors(FULL, "--plan_overrides[2].match=a") == [
        "--plan_overrides[2].match=a: plan_overrides[2]: plan_overrides has 2 items; the first is [0]"
    ]
    assert bench.errors(FULL, "--plan_overrides[0].module_type=tests.config.losses.CausalLM") == [
        "--plan_overrides[0].module_type=tests.config.losses.CausalLM: plan_overrides[0].module_type: "
        "the module 'tests.config.losses' has no 'CausalLM'; did you mean 'CausalLm'?"
    ]


def test_the_entries_of_a_base_are_replaced_as_a_whole(bench: Workbench) -> None:
    bench.write(FULL, "base.yaml")
    assert len(bench.load("base: base.yaml\n").config.plan_overrides) == 2
    (entry,) = bench.load(
        "base: base.yaml\nplan_overrides: [{match: z, replace_module: fast_norm}]\n"
    ).config.plan_overrides
    assert (entry.match, entry.when) == (("z",), None)
    assert bench.load("base: base.yaml\nplan_overrides: []\n").config.plan_overrides == []


def test_anchors(bench: Workbench) -> None:
    text = f"""\
x-norm: &norm
  when: dp
  replace_module: &fast {{name: fast_norm, eps: 1}}
{MINIMAL}plan_overrides:
  - {{<<: *norm, match: a}}
  - {{match: b, replace_module: *fast}}
  - {{match: c, replace_module: {{<<: *fast, eps: x}}}}
"""
    assert bench.errors(text) == [
        "recipe.yaml:11:49: plan_overrides[2].replace_module.eps: expected a number, got the text 'x'"
    ]
    first, second, third = bench.load(text.replace("eps: x", "eps: 2")).config.plan_overrides
    assert first.when == "dp"
    assert first.replace_module is not None
    assert second.replace_module is not None
    assert third.replace_module is not None
    assert first.replace_module.arguments == second.replace_module.arguments == {"eps": 1.0}
    assert third.replace_module.arguments == {"eps": 2.0}


def test_values_from_the_environment(bench: Workbench) -> None:
    text = f"""\
{MINIMAL}plan_overrides:
  - match: ${{env:PATTERN}}
    when: ${{env:WHEN,null}}
    module_type: ${{env:TYPE}}
    exact_type: ${{env:EXACT}}
    replace_module: ${{env:FACTORY}}
  - {{match: ["${{env:PATTERN}}", b], module_type: "${{env:TYPE}}", exact_type: "${{env:EXACT}}",
     replace_module: {{name: fast_norm, eps: "${{env:EPS}}"}}}}
"""
    env = {"PATTERN": "a.*", "TYPE": "torch.nn.Linear", "EXACT": "true", "FACTORY": "fast_norm", "EPS": "1e-5"}
    recipe = bench.load(text, env=env)
    first, second = recipe.config.plan_overrides
    assert (first.match, first.when, first.module_type, first.exact_type) == (("a.*",), None, "torch.nn.Linear", True)
    assert (second.match, second.exact_type) == (("a.*", "b"), True)
    assert second.replace_module is not None
    assert second.replace_module.arguments == {"eps": 1e-5}
    shown = resolved_yaml(recipe, origins=True)
    assert "a.*" not in shown
    assert "torch.nn" not in shown
    several = f"{MINIMAL}plan_overrides:\n- match: ${{env:PATTERN}}\n  replace_module: fast_norm\n"
    assert bench.load(several, env={"PATTERN": "[a, b]"}).config.plan_overrides[0].match == ("a", "b")


def test_errors_hide_what_came_from_the_environment(bench: Workbench) -> None:
    text = f"{MINIMAL}plan_overrides:\n- match: [a, x]\n  module_type: ${{env:TYPE}}\n  replace_module: fast_norm\n"
    assert bench.errors(text, env={"TYPE": "torch.nn.Secret"}) == [
        "recipe.yaml:7:16: plan_overrides[0].module_type: the value of '${env:TYPE}' names no torch.nn.Module that "
        "can be imported"
    ]
    assert bench.errors(text) == [
        "recipe.yaml:7:16: plan_overrides[0].module_type: the environment variable 'TYPE' is not set; "
        "set it, or write ${env:TYPE,default}"
    ]
    text = f"{MINIMAL}plan_overrides:\n- match: ${{env:MATCH}}\n  replace_module: fast_norm\n"
    assert bench.errors(text, env={"MATCH": "[secret, secret]"}) == [
        "recipe.yaml:6:10: plan_overrides[0].match[1]: repeats match[0], '${env:MATCH}'; remove one of them"
    ]


NO_CONTRACT = [
    f"    {key}: null  # default"
    for key in ("params", "in_src", "in_dst", "out_src", "out_dst", "inner_wrapper", "local_compute_fn")
]


def test_resolved_entries(bench: Workbench) -> None:
    recipe = bench.load(FULL, "--plan_overrides[1].when=dp")
    for origins in (False, True):
        again = bench.load(resolved_yaml(recipe, origins=origins), name="again.yaml")
        assert again.config == recipe.config
    lines = bench.relative(resolved_yaml(recipe, origins=True).splitlines())
    start = lines.index("plan_overrides:")
    assert lines[start : start + 34] == [
        "plan_overrides:",
        '  - match: "*norm"  # recipe.yaml:6:12',
        "    when: null  # default",
        "    module_type: null  # default",
        "    exact_type: false  # default",
        "    replace_module:",
        "      name: fast_norm  # recipe.yaml:7:21",
        "      # eps: null  # default",
        "      # mode: plain  # default",
        *NO_CONTRACT,
        '  - match: ["a.*", b]  # recipe.yaml:8:12',
        "    when: dp  # --plan_overrides[1].when=dp",
        "    module_type: torch.nn.Linear  # recipe.yaml:10:18",
        "    exact_type: true  # recipe.yaml:11:17",
        "    replace_module:",
        f"      _target_: {REPLACEMENTS}.Wrapped  # recipe.yaml:12:32",
        "      width: 3  # recipe.yaml:12:74",
        *NO_CONTRACT,
        "evaluation:",
        *lines[start + 31 : start + 34],
    ]
    assert to_shown_data(resolved_tree(bench.load(MINIMAL)))["plan_overrides"] == []
    assert to_shown_data(resolved_tree(bench.load(f"{MINIMAL}plan_overrides:\n")))["plan_overrides"] == []


def test_differences_of_entries(bench: Workbench) -> None:
    left = bench.load(FULL, name="left.yaml")
    right = bench.load(FULL.replace("width: 3", "width: 4").replace('"*norm"', '"*_norm"'), name="right.yaml")
    assert bench.relative(differences(left, right)) == [
        'plan_overrides[0].match: "*norm" (left.yaml:6:12) -> "*_norm" (right.yaml:6:12)',
        "plan_overrides[1].replace_module.width: 3 (left.yaml:12:74) -> 4 (right.yaml:12:74)",
    ]


@pytest.mark.parametrize(
    "option",
    [
        "--plan_overrides[0].match=other",
        "--plan_overrides[0].when=dp",
        "--plan_overrides[1].module_type=torch.nn.Conv1d",
        "--plan_overrides[1].exact_type=false",
        "--plan_overrides[0].replace_module.eps=1",
        "--plan_overrides[1].replace_module.width=4",
        "--plan_overrides=[]",
    ],
)
def test_every_key_of_an_entry_is_in_the_digest(bench: Workbench, option: str) -> None:
    config = bench.load(FULL).config
    assert digests(config) == digests(bench.load(FULL).config)
    changed = digests(bench.load(FULL, option).config)
    before = digests(config)
    differing = {name for name in {*before, *changed} if before.get(name) != changed.get(name)}
    assert differing
    assert all(name.startswith(option.removeprefix("--").partition("=")[0]) for name in differing)
