"""Component sections: names, import paths and arguments."""

from __future__ import annotations

import copy
import pathlib
import subprocess
import sys

import pytest

from hp_core.components import Component, Components
from hp_core.config import Target, load_recipe
from hp_core.config.importing import import_callable
from hp_core.config.loader import examine
from hp_core.config.signature import Signature, SignatureError
from hp_core.errors import InputError, Origin
from tests.config import parts
from tests.config.conftest import COMPONENTS, MINIMAL, Workbench


def with_adam(arguments: str) -> str:
    return MINIMAL.replace("optimizer: {name: sgd}", f"optimizer:\n  name: adam\n  {arguments}")


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("betas: [0, 0.9]", (0.0, 0.9)),
        ("mode: fused", "fused"),
        ("warmup: {steps: 3}", parts.Warmup(3)),
        ("warmup: null", None),
        ("decay: {rate: 1}", parts.Decay(rate=1.0)),
        ("window: {size: 3}", {"size": 3}),
        ("groups: [a]", ["a"]),
        ("steps: 3", 3),
        ("steps: all", "all"),
        ("path: a/b", pathlib.Path("a/b")),
        ("table: {a: 1}", {"a": 1.0}),
        ("free: {_target_: os.system, x: [1, null]}", {"_target_": "os.system", "x": [1, None]}),
        ("untyped: {_target_: os.system}", {"_target_": "os.system"}),
        ("thing: 3", 3),
    ],
)
def test_argument_is_converted_to_its_annotation(bench: Workbench, written: str, value: object) -> None:
    arguments = bench.load(with_adam(written)).config.optimizer.arguments
    assert list(arguments.values()) == [value]
    assert type(next(iter(arguments.values()))) is type(value)


@pytest.mark.parametrize(
    ("written", "line"),
    [
        ("lr: true", "4:7: optimizer.lr: expected a number, got the boolean 'true'"),
        ("lr: '1e-5'", "4:7: optimizer.lr: expected a number, got the text '1e-5'; remove the quotes"),
        ("betas: [1, x]", "4:14: optimizer.betas[1]: expected a number, got the text 'x'"),
        ("betas: [1]", "4:3: optimizer.betas: has too few items: item 1 is missing"),
        ("betas: [1, 2, 3]", "4:10: optimizer.betas: must have at most 2 items"),
        ("mode: fusd", "4:9: optimizer.mode: expected 'plain' or 'fused', got the text 'fusd'; did you mean 'fused'?"),
        ("steps: 1.5", "4:10: optimizer.steps: expected an integer or text, got the number '1.5'; write \"1.5\""),
        ("groups: abc", "4:11: optimizer.groups: expected a list, got the text 'abc'; write [abc]"),
        ("warmup: {step: 3}", "4:12: optimizer.warmup.step: unknown key; did you mean 'steps'?"),
        ("warmup: {start: 1}", "4:3: optimizer.warmup.steps: required key is missing"),
        ("warmup: {steps: 1, start: x}", "4:29: optimizer.warmup.start: expected a number, got the text 'x'"),
        ("warmup: 3", "4:11: optimizer.warmup: expected a mapping, got the number '3'"),
        ("decay: {rat: 1}", "4:11: optimizer.decay.rat: unknown key; did you mean 'rate'?"),
        ("decay: {rate: 2}", "4:17: optimizer.decay.rate: must be at most 1.0, got the number '2'"),
        ("decay: {rate: on}", "4:17: optimizer.decay.rate: expected a number, got the text 'on'"),
        (
            "decay: {modules: [a, 1]}",
            "4:24: optimizer.decay.modules[1]: expected text, got the number '1'; write \"1\"",
        ),
        ("window: {siz: 3}", "4:12: optimizer.window.siz: unknown key; did you mean 'size'?"),
        ("table: {a: x}", "4:14: optimizer.table.a: expected a number, got the text 'x'"),
        ("path: 3", "4:9: optimizer.path: expected text, got the number '3'; write \"3\""),
        ("foreach: no", "4:12: optimizer.foreach: expected true or false, got the text 'no'; write false"),
        ("free: .inf", "4:9: optimizer.free: must be a finite number, got '.inf'"),
        ("model: x", "4:3: optimizer.model: is provided by the trainer; remove it"),
    ],
)
def test_faulty_argument(bench: Workbench, written: str, line: str) -> None:
    text = with_adam(written).removeprefix("model: {name: net, size: 4}\n") + "model: {name: net, size: 4}\n"
    assert bench.errors(text) == [f"recipe.yaml:{int(line[0]) - 1}{line[1:]}"]


def test_all_faults_of_all_sections_come_together(bench: Workbench) -> None:
    text = """\
    model: {name: net}
    optimizer: {lr: 1}
    dataset: {name: rows, tokenizer: 3}
    training: {train_iters: 1}
    trackers: [nothing, {}]
    """
    assert bench.errors(text) == [
        "recipe.yaml:1:1: model: 'net' needs the argument 'size'; write 'size: …' in this section",
        "recipe.yaml:2:1: optimizer: names no component; write 'name:' (installed: adam, sgd) or "
        "'_target_: package.module.attribute'",
        "recipe.yaml:3:34: dataset.tokenizer: expected a component, got the number '3'; "
        "write its name, or a mapping with 'name'",
        "recipe.yaml:5:12: trackers[0].name: no trackers component is named 'nothing'; installed: tracker",
        "recipe.yaml:5:21: trackers[1]: names no component; write 'name:' (installed: tracker) or "
        "'_target_: package.module.attribute'",
    ]


def test_shorthand_qualified_name_and_import_path_are_alike(bench: Workbench) -> None:
    spellings = ("sgd", "{name: 'parts:sgd'}", "{_target_: tests.config.parts.Sgd}")
    targets = [bench.load(MINIMAL.replace("{name: sgd}", one)).config.optimizer for one in spellings]
    assert [target.load() for target in targets] == [parts.Sgd] * 3


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("os.system", "'os.system' is from the standard library, which a recipe can't call"),
        ("subprocess.run", "'subprocess.run' is from the standard library, which a recipe can't call"),
        ("builtins.eval", "'builtins.eval' is from the standard library, which a recipe can't call"),
        ("tests.config.parts.os.system", "'tests.config.parts.os.system' is from the standard library"),
        ("tests.config.parts.run_command", "'tests.config.parts.run_command' is from the standard library"),
        ("tests.config.parts.run_partial", "'tests.config.parts.run_partial' is from the standard library"),
        ("tests.config.parts.dataclasses.replace", "'tests.config.parts.dataclasses.replace' is from the standard"),
        ("tests.config.parts.net.__call__", "'tests.config.parts.net.__call__' is from the standard library"),
        ("tests.config.parts.Mapping2.fromkeys", "'tests.config.parts.Mapping2.fromkeys' is from the standard library"),
        ("tests.config.parts.CONSTANT", "'tests.config.parts.CONSTANT' is not callable"),
        ("tests.config.parts.Sdg", "the module 'tests.config.parts' has no 'Sdg'; did you mean 'Sgd'?"),
        ("tests.config.part.Sgd", "the module 'tests.config' has no 'part'; did you mean 'parts'?"),
        ("nowhere.Sgd", "'nowhere.Sgd' can't be imported: no module named 'nowhere'; install its package"),
        ("tests.config.parts:Sgd", "'tests.config.parts:Sgd' is not a dotted path; write 'tests.config.parts.Sgd'"),
        ("Sgd", "'Sgd' is not a dotted path; write package.module.name"),
        ("tests.config.parts.positional", "'tests.config.parts.positional' has the positional-only parameter 'value'"),
    ],
)
def test_refused_import_path(bench: Workbench, path: str, message: str) -> None:
    (line,) = bench.errors(MINIMAL.replace("{name: sgd}", f'{{_target_: "{path}"}}'))
    assert line.startswith(f"recipe.yaml:2:23: optimizer._target_: {message}")


def test_faulty_modules(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.write("import no_such_dependency\n", "needs_more.py")
    bench.write("raise ValueError('at import')\n", "raises.py")
    bench.write("raise SystemExit(3)\n", "exits.py")
    monkeypatch.syspath_prepend(bench.directory)
    for path, cause in {
        "needs_more.f": "'needs_more' needs the module 'no_such_dependency', which is not installed",
        "raises.f": "'raises' raises ValueError: at import",
        "exits.f": "'exits' raises SystemExit: 3",
    }.items():
        (line,) = bench.errors(MINIMAL.replace("{name: sgd}", f"{{_target_: {path}}}"))
        assert line == f"recipe.yaml:2:23: optimizer._target_: '{path}' can't be imported: {cause}"


def test_import_path_may_go_through_classes() -> None:
    assert import_callable("tests.config.parts.Adam.small").__func__ is parts.Adam.small.__func__  # type: ignore[attr-defined]


def test_broken_component_is_an_error_never_a_default(bench: Workbench) -> None:
    broken = Component("hp.losses", "broken", "tests.config.nowhere:Loss", "acme", "2.0")
    path = bench.write(f"{MINIMAL}loss_fn: broken\n")
    with pytest.raises(InputError) as caught:
        load_recipe(path, components=Components([*COMPONENTS.all(), broken]))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{path}:5:10: loss_fn.name: acme 2.0: entry point 'broken = tests.config.nowhere:Loss'")
    assert "ModuleNotFoundError: No module named 'tests.config.nowhere'" in line


@pytest.mark.parametrize("name", ["CausalLm", "make_loss", "unannotated_loss"])
def test_loss(bench: Workbench, name: str) -> None:
    loss_fn = bench.load(f"{MINIMAL}loss_fn: {{_target_: tests.config.losses.{name}}}\n").config.loss_fn
    assert loss_fn is not None
    assert type(loss_fn.build()).__name__ == "CausalLm"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tests.config.losses.NotALoss", "'tests.config.losses.NotALoss' is not a torch.nn.Module"),
        ("tests.config.losses.not_a_loss", "'tests.config.losses.not_a_loss' returns int, not a torch.nn.Module"),
        ("tests.config.parts.Sgd", "'tests.config.parts.Sgd' is not a torch.nn.Module"),
    ],
)
def test_what_is_no_loss(bench: Workbench, path: str, message: str) -> None:
    lines = bench.errors(f"{MINIMAL}loss_fn: {{_target_: {path}}}\n")
    assert lines[-1].startswith(f"recipe.yaml:5:21: loss_fn._target_: {message}; a loss is a torch.nn.Module class")


def test_build_passes_what_the_callable_declares(bench: Workbench) -> None:
    config = bench.load(f"{MINIMAL}lr_scheduler: {{name: anything, a: 1}}\n").config
    assert config.model.build(activation_checkpoint=3, peft_config=4) == {
        "size": 4,
        "activation_checkpoint": 3,
        "note": "",
    }
    assert config.lr_scheduler is not None
    assert config.lr_scheduler.build(optimizer=2, train_iters=3) == {"a": 1, "optimizer": 2, "train_iters": 3}


def test_each_build_has_its_own_arguments(bench: Workbench) -> None:
    target = bench.load(with_adam("free: {list: [1]}")).config.optimizer
    target.build(model=None).arguments["free"]["list"].append(2)
    assert target.arguments["free"] == {"list": [1]}


def test_argument_error_is_located(bench: Workbench) -> None:
    target = bench.load(with_adam("lr: 0.5\n  decay: {modules: [a]}")).config.optimizer
    with pytest.raises(InputError) as caught:
        target.build(model=None)
    assert bench.relative([str(caught.value)]) == [
        "recipe.yaml:5:21: optimizer.decay.modules[0]: matches nothing; did you mean 'b'?"
    ]
    with pytest.raises(InputError) as caught:
        bench.load(with_adam("lr: 0.5")).config.optimizer.build(model=None)
    assert bench.relative([str(caught.value)])[0].startswith("recipe.yaml:2:1: optimizer.decay.modules[0]: ")


def test_other_errors_of_a_component_pass_through(bench: Workbench) -> None:
    target = bench.load(with_adam("lr: 0.25")).config.optimizer
    with pytest.raises(TypeError, match="own"):
        target.build(model=None)


def test_target_compares_by_what_it_builds() -> None:
    one = Target("optimizer", "hp.optimizers", "sgd", arguments={"lr": 1.0}, origins={"lr": Origin("a.yaml", 1, 1)})
    assert one == copy.deepcopy(one) == Target("optimizer", "hp.optimizers", "sgd", arguments={"lr": 1.0})
    assert one != Target("optimizer", "hp.optimizers", "sgd", arguments={"lr": 2.0})
    assert len({one, copy.deepcopy(one)}) == 1


def test_signature_without_annotations_or_signature() -> None:
    class Opaque:
        __signature__ = "none"

        def __call__(self) -> None: ...

    signature = Signature.of(parts.anything)
    assert signature.is_open
    assert signature.accepted({"x": 1}) == {"x": 1}
    with pytest.raises(SignatureError, match="has no signature"):
        Signature.of(Opaque())


def test_config_imports_nothing_heavy() -> None:
    program = (
        "import sys, hp_core.config, hp_core.config.json_schema, hp_core.config.render, hp_core.cli.check\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_name_that_is_a_path_is_told_how_to_write_one(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("loss_fn: tests.config.losses.Nothing\n")
    problems = [str(one) for one in examine(path).problems if "loss_fn" in str(one)]
    assert problems[0].endswith("write {_target_: tests.config.losses.Nothing}")
