"""A recipe file to a checked configuration, and every error with its position."""

from __future__ import annotations

import pathlib
import pickle
import time

import pydantic
import pytest

from hp_core.components import Components
from hp_core.config import load_recipe
from hp_core.errors import InputError, Origin
from tests.config.conftest import COMPONENTS, MINIMAL, Workbench


def test_minimal_recipe_has_all_defaults(bench: Workbench) -> None:
    config = bench.load(MINIMAL).config
    assert config.training.global_batch_size == 8
    assert config.training.max_grad_norm == 1.0
    assert config.trainer.name == "text"
    assert config.dataloader.loader.name == "torch"
    assert config.dataloader.collate_fn is None
    assert config.dataset.tokenizer is None
    assert config.loss_fn is None
    assert config.trackers == []
    assert config.launch.timeout == 1800.0


def test_configuration_is_frozen_and_pickles(bench: Workbench) -> None:
    config = bench.load(MINIMAL).config
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.training.seed = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config


def test_five_faults_give_five_lines(bench: Workbench) -> None:
    text = """\
    model:
      name: net
      size: 4
    training:
      train_itres: 10
      seed: true
      log_every: 2
      log_every: 3
    loss_fn:
      name: causal_lm
      ignore_indx: -1
    optimizer:
      name: adan
      lr: 1e-5
    dataset: rows
    """
    assert bench.errors(text) == [
        "recipe.yaml:5:3: training.train_itres: unknown key; did you mean 'train_iters'?",
        "recipe.yaml:6:9: training.seed: expected an integer, got the boolean 'true'",
        "recipe.yaml:8:3: training.log_every: repeated key, first on line 7; remove one of them",
        "recipe.yaml:11:3: loss_fn.ignore_indx: unknown argument of 'causal_lm'; "
        "did you mean 'ignore_index'? accepted: ignore_index, softcap",
        "recipe.yaml:13:9: optimizer.name: no optimizer component is named 'adan'; "
        "did you mean 'adam'? installed: adam, sgd",
    ]


@pytest.mark.parametrize(
    ("training", "line"),
    [
        ("seed: ten", "5:9: training.seed: expected an integer, got the text 'ten'"),
        ("seed: '8'", "5:9: training.seed: expected an integer, got the text '8'; remove the quotes"),
        ("seed: 8.0", "5:9: training.seed: expected an integer, got the number '8.0'; write 8"),
        ("seed: [1]", "5:9: training.seed: expected an integer, got a list"),
        ("seed: 12:30", "5:9: training.seed: expected an integer, got the text '12:30'"),
        ("seed: -1", "5:9: training.seed: must be at least 0, got the number '-1'"),
        ("seed:", "5:3: training.seed: expected an integer, got null"),
        ("max_grad_norm: on", "5:18: training.max_grad_norm: expected a number, got the text 'on'"),
        ("max_grad_norm: true", "5:18: training.max_grad_norm: expected a number, got the boolean 'true'"),
        ("max_grad_norm: .nan", "5:18: training.max_grad_norm: must be a finite number, got '.nan'"),
        ("max_grad_norm: -.inf", "5:18: training.max_grad_norm: must be a finite number, got '-.inf'"),
        ("max_grad_norm: 0", "5:18: training.max_grad_norm: must be greater than 0.0, got the number '0'"),
        (
            "enable_full_determinism: yes",
            "5:28: training.enable_full_determinism: expected true or false, got the text 'yes'; write true",
        ),
        ("nonfinite: no", "5:14: training.nonfinite: expected 'stop' or 'skip', got the text 'no'"),
        (
            "nonfinite: stpo",
            "5:14: training.nonfinite: expected 'stop' or 'skip', got the text 'stpo'; did you mean 'stop'?",
        ),
        (
            "backend: ncll",
            "5:12: training.backend: expected 'nccl' or 'gloo', got the text 'ncll'; did you mean 'nccl'?",
        ),
        ("zzz: 1", None),
    ],
)
def test_wrong_value(bench: Workbench, training: str, line: str | None) -> None:
    text = MINIMAL.replace("training: {train_iters: 10}", f"training:\n  {training}\n  train_iters: 10")
    lines = bench.errors(text)
    assert len(lines) == 1
    if line is not None:
        assert lines == [f"recipe.yaml:{line}"]
    else:
        assert lines[0].startswith("recipe.yaml:5:3: training.zzz: unknown key; known keys: backend, device, ")


@pytest.mark.parametrize(
    ("spelling", "value"),
    [("1e-5", 1e-5), ("1E-5", 1e-5), ("+1e-5", 1e-5), ("1.e-5", 1e-5), ("1_000", 1000.0), ("010", 10.0), ("3", 3.0)],
)
def test_number_in_core_component_and_free_form(bench: Workbench, spelling: str, value: float) -> None:
    text = MINIMAL.replace("{name: sgd}", f"{{name: adam, lr: {spelling}, free: {{lr: {spelling}}}}}")
    text = text.replace("train_iters: 10", f"train_iters: 10, max_grad_norm: {spelling}")
    config = bench.load(text).config
    assert config.training.max_grad_norm == value
    assert config.optimizer.arguments["lr"] == value
    assert isinstance(config.optimizer.arguments["lr"], float)
    assert config.optimizer.arguments["free"] == {"lr": value}
    assert not isinstance(config.optimizer.arguments["free"]["lr"], str)


@pytest.mark.parametrize("written", ["no", "on", "yes", "12:30", "2024-01-01", "None", "=", "inf"])
def test_words_of_yaml_1_1_stay_text(bench: Workbench, written: str) -> None:
    assert bench.load(f"{MINIMAL}output_dir: {written}\n").config.output_dir == written


@pytest.mark.parametrize("written", ["010", "1e5", "true", "1_000"])
def test_other_values_for_text_are_refused(bench: Workbench, written: str) -> None:
    (line,) = bench.errors(f"{MINIMAL}output_dir: {written}\n")
    assert line.startswith("recipe.yaml:5:13: output_dir: expected text, got the ")
    assert line.endswith(f"'{written}'; write \"{written}\"")


def test_unknown_key_without_a_value(bench: Workbench) -> None:
    assert bench.errors(f"{MINIMAL}evalution:\n  # every: 3\n") == [
        "recipe.yaml:5:1: evalution: unknown key; did you mean 'evaluation'?"
    ]


def test_a_length_that_is_not_known_is_not_missing_as_well(bench: Workbench) -> None:
    (line,) = bench.errors(MINIMAL.replace("{train_iters: 10}", '{train_iters: "${env:N}"}'))
    assert line.startswith("recipe.yaml:4:25: training.train_iters: the environment variable 'N' is not set")


def test_misplaced_key(bench: Workbench) -> None:
    assert bench.errors(f"{MINIMAL}micro_batch_size: 3\n") == [
        "recipe.yaml:5:1: micro_batch_size: unknown key; did you mean 'training.micro_batch_size'?"
    ]


def test_missing_keys_point_at_their_section(bench: Workbench) -> None:
    assert bench.errors("training:\n  seed: 1\n") == [
        "recipe.yaml:1:1: model: required key is missing",
        "recipe.yaml:1:1: optimizer: required key is missing",
        "recipe.yaml:1:1: dataset: required key is missing",
        "recipe.yaml:1:1: training: needs exactly one of train_iters, train_samples and train_epochs; none is given",
    ]


def test_misspelt_key_is_not_missing_as_well(bench: Workbench) -> None:
    assert bench.errors(MINIMAL.replace("model:", "modle:")) == [
        "recipe.yaml:1:1: modle: unknown key; did you mean 'model'?"
    ]


def test_lengths_exclude_each_other_besides_other_faults(bench: Workbench) -> None:
    text = MINIMAL.replace("{train_iters: 10}", "{train_iters: 10, train_epochs: 2, seed: x}")
    assert bench.errors(text) == [
        "recipe.yaml:4:1: training: needs exactly one of train_iters, train_samples and train_epochs; "
        "both train_iters and train_epochs are given",
        "recipe.yaml:4:52: training.seed: expected an integer, got the text 'x'",
    ]


def test_keys_of_later_versions_are_refused_unless_empty(bench: Workbench) -> None:
    empty = "peft:\ncompile: {}\nplan_overrides: []\n"
    assert bench.load(MINIMAL + empty).config == bench.load(MINIMAL).config
    (line,) = bench.errors(f"{MINIMAL}peft: {{method: lora, load_in_4bit: true}}\n")
    assert line.startswith("recipe.yaml:5:22: peft.load_in_4bit: not supported by version ")


def test_sections_of_comments_only_are_empty(bench: Workbench) -> None:
    empty = "evaluation:\n  # every: 3\ntrackers:\nplugins:\nloss_fn:\nplan_overrides:\ntrainer:\ndataloader:\n"
    config = bench.load(MINIMAL + empty).config
    assert config == bench.load(MINIMAL).config


def test_anchors_live_under_x_keys(bench: Workbench) -> None:
    text = f"x-sizes: &sizes {{size: 9}}\nx-unused: ${{env:NOWHERE}}\n{MINIMAL}".replace("size: 4", "<<: *sizes")
    assert bench.load(text).config.model.arguments == {"size": 9}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "recipe.yaml: is empty; a recipe is a mapping of keys"),
        ("# nothing\n", "recipe.yaml: is empty; a recipe is a mapping of keys"),
        ("- a\n", "recipe.yaml:1:1: a recipe is a mapping of keys, this is a list"),
        ("text\n", "recipe.yaml:1:1: a recipe is a mapping of keys, this is the text 'text'"),
        ("a: [\n", "recipe.yaml:2:1: expected the node content, but found the end"),
    ],
)
def test_no_recipe(bench: Workbench, text: str, line: str) -> None:
    assert bench.errors(text) == [line]


def test_missing_file_and_directory(tmp_path: pathlib.Path) -> None:
    for path, cause in ((tmp_path / "none.yaml", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(InputError) as caught:
            load_recipe(path, components=COMPONENTS)
        assert str(caught.value) == f"{path}: can't read this file: {cause}"


def test_base_merges_maps_and_replaces_lists(bench: Workbench) -> None:
    bench.write(f"{MINIMAL}plugins: [a, b]\nevaluation: {{every: 5, samples: {{seed: 3}}}}\n", "deep/base.yaml")
    bench.write("base: base.yaml\nevaluation: {samples: {temperature: 0.5}}\n", "deep/middle.yaml")
    recipe = bench.load("base: deep/middle.yaml\nplugins: [c]\ntraining: {seed: 7}\n")
    config = recipe.config
    assert config.plugins == ["c"]
    assert (config.training.train_iters, config.training.seed) == (10, 7)
    assert (config.evaluation.every, config.evaluation.samples.seed, config.evaluation.samples.temperature) == (
        5,
        3,
        0.5,
    )
    assert bench.relative([str(recipe.origin("evaluation.every"))]) == ["deep/base.yaml:6:21"]
    assert recipe.origin("training.log_every") == recipe.origin("training")
    assert recipe.origin("launch.nproc") == recipe.tree.origin
    assert bench.relative(recipe.files) == ["recipe.yaml", "deep/middle.yaml", "deep/base.yaml"]


def test_another_component_drops_the_bases_arguments(bench: Workbench) -> None:
    base = MINIMAL.replace("{name: sgd}", "{name: adam, lr: 0.3}").replace(
        "{name: rows}", "{name: rows, limit: 3, tokenizer: words}"
    )
    bench.write(base, "base.yaml")
    assert bench.load("base: base.yaml\noptimizer: {name: sgd}\n").config.optimizer.arguments == {}
    assert bench.load("base: base.yaml\noptimizer: adam\n").config.optimizer.arguments == {"lr": 0.3}
    assert bench.load("base: base.yaml\noptimizer: {betas: [0, 0]}\n").config.optimizer.arguments == {
        "lr": 0.3,
        "betas": (0.0, 0.0),
    }
    dataset = bench.load("base: base.yaml\ndataset: {_target_: tests.config.parts.other_rows}\n").config.dataset
    assert dataset.source.arguments == {}
    assert dataset.source.name is None
    assert dataset.tokenizer is not None


def test_precedence(bench: Workbench) -> None:
    bench.write(
        MINIMAL.replace("train_iters: 10", "train_iters: 10, seed: 1, log_every: 1, nonfinite_limit: 1"), "base.yaml"
    )
    text = "base: base.yaml\ntraining: {seed: 2, log_every: 2}\n"
    training = bench.load(text, "--training.seed=3").config.training
    assert (training.seed, training.log_every, training.nonfinite_limit, training.micro_batch_size) == (3, 2, 1, 1)


def test_faulty_bases(bench: Workbench) -> None:
    bench.write("base: recipe.yaml\n", "b.yaml")
    assert bench.errors("base: b.yaml\n") == [
        "b.yaml:1:7: base: the bases form a cycle: recipe.yaml -> b.yaml -> recipe.yaml"
    ]
    assert bench.errors("base: none.yaml\n") == ["recipe.yaml:1:7: base: there is no file 'none.yaml'"]
    assert bench.errors("base: 3\n") == ["recipe.yaml:1:7: base: expected the path of a recipe, got the number '3'"]
    bench.write("a: 1\na: 2\nb: [\n", "c.yaml")
    lines = bench.errors("base: c.yaml\n")
    assert [line.split(": ")[0] for line in lines] == ["c.yaml:2:1", "c.yaml:4:1"]


def test_base_from_the_command_line(bench: Workbench) -> None:
    path = bench.write(MINIMAL, "base.yaml")
    assert bench.load("training: {seed: 5}\n", f"--base={path}").config.training.seed == 5


def test_errors_of_a_base_name_its_file(bench: Workbench) -> None:
    bench.write(f"{MINIMAL}launch: {{nprok: 2}}\n", "base.yaml")
    assert bench.errors("base: base.yaml\ntraining: {sede: 1}\n") == [
        "recipe.yaml:2:12: training.sede: unknown key; did you mean 'seed'?",
        "base.yaml:5:10: launch.nprok: unknown key; did you mean 'nproc'?",
    ]


def test_problem_of_a_value(bench: Workbench) -> None:
    recipe = bench.load(MINIMAL, "--training.seed=3")
    assert recipe.origin("training.seed") == Origin(option="--training.seed=3")
    problem = recipe.problem("training.train_iters", "is too short", "write 20")
    assert bench.relative([str(problem)]) == ["recipe.yaml:4:25: training.train_iters: is too short; write 20"]


def test_defaults_need_their_components(bench: Workbench) -> None:
    path = bench.write(MINIMAL)
    some = Components(one for one in COMPONENTS.all() if one.group != "hp.trainers")
    with pytest.raises(InputError, match=r"trainer\.name: no trainer component is named 'text'"):
        load_recipe(path, components=some)


def test_a_recipe_twice_as_long_takes_about_twice_as_long(bench: Workbench) -> None:
    def best_seconds(num_keys: int) -> float:
        table = "".join(f"    key{index}: {index}.5e-3\n" for index in range(num_keys))
        rest = "".join(f"  key{index}: text {index} # comment\n" for index in range(num_keys))
        text = (
            MINIMAL.replace("{name: sgd}", f"\n  name: adam\n  table:\n{table}")
            + f"lr_scheduler:\n  name: anything\n{rest}"
        )
        seconds = []
        for _ in range(5):
            start = time.process_time()
            bench.load(text)
            seconds.append(time.process_time() - start)
        return min(seconds)

    # Work that grows with the square would be four times as much.
    assert best_seconds(400) < 3 * best_seconds(200)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("{name: sgd}", "null", "2:1: optimizer: required key is missing"),
        ("{name: sgd}", "{name: 3}", "2:19: optimizer.name: expected text, got the number '3'"),
        (
            "{name: rows}",
            "[1]",
            "3:10: dataset: expected a component, got a list; write its name, or a mapping with 'name'",
        ),
        (
            "{name: rows}",
            "{name: rows, tokenzer: words}",
            "3:23: dataset.tokenzer: unknown argument of 'rows'; "
            "did you mean 'tokenizer'? accepted: limit, path, tokenizer",
        ),
        (
            "{name: sgd}",
            "None",
            "2:12: optimizer.name: no optimizer component is named 'None'; nothing is written null",
        ),
        ("{train_iters: 10}", "3", "4:11: training: expected a mapping, got the number '3'"),
    ],
)
def test_faulty_section(bench: Workbench, old: str, new: str, line: str) -> None:
    assert bench.errors(MINIMAL.replace(old, new)) == [f"recipe.yaml:{line}"]


def test_a_plugin_by_another_name_stays_where_the_recipe_has_it(bench: Workbench) -> None:
    recipe = bench.load(f"{MINIMAL}plugins: [a, b]\n").with_plugins(["a", "/b", "c"])
    assert recipe.config.plugins == ["a", "/b", "c"]
    assert str(recipe.origin("plugins[1]")).endswith("recipe.yaml:5:14")
    assert str(recipe.origin("plugins[2]")) == "--plugin c"
