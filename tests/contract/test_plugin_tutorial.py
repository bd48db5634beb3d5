"""The tutorial works as written: its files are installed and used."""

from __future__ import annotations

import configparser
import math
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ruamel.yaml import YAML

from hp_core.components import GROUPS, Components
from hp_core.data.rows import as_datasets
from hp_core.plugins import load_plugins
from hp_core.training.built import require_loss_call
from hp_core.training.loss import columns_of
from tests.fakes import REPOSITORY, install, on_path

TEXT = (REPOSITORY / "docs" / "writing-a-plugin.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install the tutorial's package, with the entry points of its setup.cfg, as pip would."""
    path = tmp_path_factory.mktemp("site")
    config = configparser.ConfigParser()
    config.read_string(FILES["setup.cfg"])
    points = {
        group: dict(re.findall(r"(\S+) = (\S+)", lines)) for group, lines in config["options.entry_points"].items()
    }
    requires = tuple(config["options"]["install_requires"].split())
    metadata = config["metadata"]
    install(path, metadata["name"], metadata["version"], entry_points=points, requires=requires)
    for name, source in FILES.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(source)
    with on_path(path):
        yield path


def test_the_files_are_all_found() -> None:
    assert sorted(FILES) == [
        "acme_hp/freeze.py",
        "acme_hp/optimizers.py",
        "memory.py",
        "my_project/data.py",
        "my_project/experts.py",
        "my_project/losses.py",
        "my_project/weighted.py",
        "my_project/wrappers.py",
        "pyproject.toml",
        "setup.cfg",
    ]


def test_the_loss_is_importable_and_scales(site: Path) -> None:
    loss = import_module("my_project.losses").ScaledLoss(scale=0.5)
    assert loss(model_output=SimpleNamespace(loss=torch.tensor(3.0)), labels=None).item() == 1.5


def test_the_weighted_loss_takes_its_column_and_weighs(site: Path) -> None:
    loss = import_module("my_project.weighted").WeightedLoss()
    assert columns_of(loss) == ("weights",)
    require_loss_call(loss, columns_of(loss))
    # Equal logits over four classes: ln 4 for each of the two tokens with a target, which weigh 0.5 and 3.
    labels, weights = torch.tensor([[1, -100, 2]]), torch.tensor([[0.5, 7.0, 3.0]])
    value = loss(model_output=SimpleNamespace(logits=torch.zeros(1, 3, 4)), labels=labels, weights=weights)
    assert value.item() == pytest.approx(3.5 * math.log(4))


def test_the_code_inside_a_sharded_model_is_put_in(site: Path) -> None:
    def forward(value: torch.Tensor) -> tuple[torch.Tensor, None]:
        return value, None

    module = torch.nn.Module()
    module.forward = forward
    import_module("my_project.wrappers").scaled(module, cp_mesh=None, factor=0.25)
    assert module(torch.tensor(8.0))[0].item() == 2.0
    compute = import_module("my_project.experts").silent(module, ep_mesh=None)
    assert compute(torch.ones(2, 3), None, None).tolist() == [[0.0] * 3] * 2


def test_the_data_set_is_one_that_the_trainer_takes(site: Path) -> None:
    datasets = as_datasets(import_module("my_project.data").counting(rows=5))
    assert (len(datasets.train), datasets.train.max_seq_len) == (5, 32)
    row = datasets.train[2]
    assert (row["input_ids"] + 1 == row["labels"]).all()
    assert (datasets.train[-1]["labels"] == -100).all()


def test_the_named_optimizer_is_installed_and_built(site: Path) -> None:
    component = Components.discover().find("hp.optimizers", "adagrad")
    assert component == Components.discover().find("hp.optimizers", "acme-hp:adagrad")
    optimizer = component.load()(lr=0.02, model=torch.nn.Linear(2, 1)).get_optimizer()
    assert isinstance(optimizer, torch.optim.Adagrad)
    assert optimizer.param_groups[0]["lr"] == 0.02


def test_both_plugins_do_what_they_say(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3)

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.embed

    (site / "model.py").write_text(
        "from hp_core.hookspecs import hookimpl\n@hookimpl\ndef build_model(config):\n    return config\n"
    )
    plugins = load_plugins(["memory.py", "freeze", "model.py"], base_dir=site)
    others = ["distributed_setup", "peft_config", "activation_checkpoint", "activation_swap", "compile_config"]
    model = plugins.hook.build_model(config=Model(), **dict.fromkeys(others))
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trainable == ["head.weight", "head.bias"]
    for step in (9, 10):
        plugins.hook.on_step_end(run=None, step=step)
    assert re.fullmatch(r"step 10: \d+ kB\n", capsys.readouterr().out)


def test_the_recipes_are_yaml_that_names_the_tutorials_things() -> None:
    recipes = [
        YAML(typ="safe", pure=True).load(text) for text in re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)
    ]
    assert recipes == [
        {"loss_fn": {"_target_": "my_project.losses.ScaledLoss", "scale": 0.5}},
        {"optimizer": {"name": "adagrad", "lr": 0.02}},
        {"dataset": {"_target_": "my_project.data.counting", "rows": 128}},
        {
            "loss_fn": {"_target_": "my_project.weighted.WeightedLoss"},
            "dataset": {"name": "text", "files": "data/*.jsonl", "columns": ["weights"]},
        },
        {
            "plan_overrides": [
                {
                    "match": "*.self_attn",
                    "inner_wrapper": {"_target_": "my_project.wrappers.scaled", "factor": 0.9},
                },
                {"match": "*.experts", "when": "ep", "local_compute_fn": {"_target_": "my_project.experts.silent"}},
            ]
        },
        {"plugins": ["memory.py"]},
        {"plugins": ["freeze"]},
    ]


def test_the_table_of_groups_is_complete() -> None:
    start = TEXT.index("<!-- groups: ")
    rows = [line for line in TEXT[start : TEXT.index("<!-- end of groups")].splitlines() if line.startswith("| `")]
    expected = [
        f"| `{one.section}` | `{one.name}` | {', '.join(f'`{name}`' for name in one.runtime_arguments) or 'none'} |"
        for one in GROUPS
    ]
    assert rows == expected
