from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from hp_core.components import Component
from hp_core.errors import Origin
from hp_core.plugins import InstalledPlugins, provenance
from tests.fakes import environment, install, on_path, write_module
from tests.plugin_fakes import BUILD_LOSS, HEADER, Defaults, load, plugin, refuse


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "site"
    path.mkdir()
    with on_path(path):
        yield path


# --- what works


def test_a_plugin_answers_before_the_defaults_and_none_passes_on(site: Path) -> None:
    plugin(site, "good", "@hookimpl\ndef build_loss(config):\n    return None if config == 'pass' else 'plugin loss'\n")
    plugins = load(["good"], site, defaults=[Defaults()])
    assert plugins.hook.build_loss(config="c") == "plugin loss"
    assert plugins.hook.build_loss(config="pass") == "default loss of pass"
    assert [(one.name, one.distribution, one.version, one.source, one.hooks) for one in plugins.records] == [
        ("good", "good-dist", "1.0", "fake_good", ("build_loss",))
    ]


def test_without_plugins_only_the_defaults_run(site: Path) -> None:
    plugin(site, "good", "@hookimpl\ndef build_loss(config):\n    return 'installed, not named'\n")
    plugins = load([], site, defaults=[Defaults()])
    assert plugins.records == ()
    assert plugins.hook.build_loss(config="c") == "default loss of c"
    assert plugins.hook.build_optimizer(config="c", model="m") is None


def test_observers_run_in_the_order_of_the_recipe(site: Path) -> None:
    for name in ("a", "b", "c"):
        plugin(site, name, f"@hookimpl\ndef on_step_end(run):\n    run.append({name!r})\n")
    for order in permutations("abc"):
        run: list[str] = []
        load(list(order), site, defaults=[Defaults()]).hook.on_step_end(run=run, step=1)
        assert run == [*order, "default"]


def test_wrappers_see_the_result_and_the_first_listed_is_outermost(site: Path) -> None:
    for name in ("a", "b"):
        source = f"@hookimpl(wrapper=True)\ndef build_loss():\n    result = yield\n    return f'{name}({{result}})'\n"
        plugin(site, name, source)
    assert load(["a", "b"], site, defaults=[Defaults()]).hook.build_loss(config="c") == "a(b(default loss of c))"
    assert load(["b", "a"], site, defaults=[Defaults()]).hook.build_loss(config="c") == "b(a(default loss of c))"


def test_a_plugin_may_be_an_instance_with_methods(site: Path) -> None:
    source = """
class Counter:
    def __init__(self): self.steps = 0
    @property
    def build_model(self): raise RuntimeError("properties are left alone")
    @hookimpl
    def on_step_end(self, run, step): run.append(self.steps + step)
    @hookimpl(specname="build_loss")
    def my_loss(self, config): return f"{config}!"
    @staticmethod
    @hookimpl
    def on_plan(plan): plan.append("static")
counter = Counter()
"""
    install(
        site,
        "counting",
        entry_points={"hp.plugins": {"counter": "fake_counter:counter"}},
        modules={"fake_counter": HEADER + source},
    )
    plugins = load(["counting:counter"], site)
    run: list[Any] = []
    plugins.hook.on_step_end(run=run, step=4)
    plugins.hook.on_plan(plan=run)
    assert run == [4, "static"]
    assert plugins.hook.build_loss(config="c") == "c!"
    assert plugins.records[0].hooks == ("on_plan", "build_loss", "on_step_end")


def test_each_call_makes_a_manager_of_its_own(site: Path) -> None:
    plugin(site, "good", "@hookimpl\ndef build_loss(config):\n    return 'plugin loss'\n")
    first, second = load(["good"], site), load([], site)
    assert first.hook.build_loss(config="c") == "plugin loss"
    assert second.hook.build_loss(config="c") is None


# --- what is refused


def test_an_unknown_plugin_gets_the_nearest_name_the_list_and_how_to_install(site: Path) -> None:
    plugin(site, "profiler", BUILD_LOSS)
    assert refuse(["profilr"], site) == [
        "plugins[0]: no plugin is named 'profilr'; did you mean 'profiler'? installed: profiler; "
        "a plugin comes with a package: pip install it, or give the path of a .py file"
    ]


def test_a_plugin_listed_twice_is_refused_however_it_is_spelt(site: Path) -> None:
    plugin(site, "good", BUILD_LOSS)
    install(site, "alias", entry_points={"hp.plugins": {"same": "fake_good"}})
    write_module(site, "one", HEADER + "@hookimpl\ndef on_plan(plan): pass\n")
    assert refuse(["good", "good-dist:good", "one.py", "same", "./one.py"], site) == [
        "plugins[1]: plugin 'good-dist:good' is listed already as 'good', in plugins[0]",
        "plugins[3]: plugin 'same' is listed already as 'good', in plugins[0]",
        "plugins[4]: plugin './one.py' is listed already as 'one.py', in plugins[2]",
    ]


def test_two_distributions_with_one_plugin_name_in_any_order(tmp_path: Path) -> None:
    sites = [tmp_path / "a", tmp_path / "b"]
    for site, owner in zip(sites, ("acme", "zeta"), strict=True):
        install(
            site,
            owner,
            entry_points={"hp.plugins": {"twin": f"fake_{owner}"}},
            modules={f"fake_{owner}": f"{HEADER}@hookimpl\ndef build_loss(config):\n    return {owner!r}\n"},
        )
    for order in permutations(sites):
        with on_path(*order):
            assert refuse(["twin"], tmp_path) == [
                "plugins[0]: acme 1.0 and zeta 1.0 each offer a plugin named 'twin'; write 'acme:twin' or 'zeta:twin'"
            ]
            assert load(["zeta:twin"], tmp_path).hook.build_loss(config="c") == "zeta"
            assert InstalledPlugins.discover().names() == ("acme:twin", "zeta:twin")


def test_two_plugins_answering_one_firstresult_hook_are_refused_and_wrappers_are_not(site: Path) -> None:
    plugin(site, "a", BUILD_LOSS)
    plugin(site, "b", BUILD_LOSS, number="2.0")
    plugin(site, "w", "@hookimpl(wrapper=True)\ndef build_loss():\n    return (yield) + 1\n")
    for first, second, versions in (("a", "b", ("1.0", "2.0")), ("b", "a", ("2.0", "1.0"))):
        [problem] = refuse(["w", first, second], site)
        assert problem == (
            f"plugins[2]: plugin '{first}' ({first}-dist {versions[0]}) and plugin '{second}' "
            f"({second}-dist {versions[1]}) both answer 'build_loss'; "
            "remove one of them, or make one a wrapper with hookimpl(wrapper=True)"
        )
    assert load(["w", "a"], site, defaults=[Defaults()]).hook.build_loss(config="c") == 2


def test_all_problems_of_all_plugins_come_together_in_the_recipes_order(site: Path) -> None:
    plugin(site, "a", BUILD_LOSS)
    plugin(site, "b", BUILD_LOSS)
    plugin(site, "typo", "@hookimpl\ndef bild_loss(config): pass\n@hookimpl\ndef on_plam(plan): pass\n")
    origins = {f"plugins[{n}]": Origin(file="r.yaml", line=n + 2, column=5) for n in range(5)}
    origins["plugins[4]"] = Origin(option="-p nowhere")
    problems = refuse(["a", "typo", "b", "missing.py", "nowhere"], site, origins=origins)
    assert [problem.split(": ")[0] for problem in problems] == ["r.yaml:3:5"] * 2 + [
        "r.yaml:4:5",
        "r.yaml:5:5",
        "-p nowhere",
    ]


def test_installed_but_unnamed_broken_plugins_hurt_nobody(site: Path) -> None:
    plugin(site, "good", BUILD_LOSS)
    plugin(site, "bad_import", "import nowhere_at_all\n")
    plugin(site, "bad_typo", BUILD_LOSS.replace("build", "bild"))
    plugin(site, "bad_mark", BUILD_LOSS.replace("@hookimpl", ""))
    plugin(site, "bad_exit", "import os; os._exit(1)\n")
    assert load(["good"], site).hook.build_loss(config="c") == 1
    assert not [name for name in sys.modules if name.startswith("fake_bad")]


# --- provenance


def test_the_provenance_is_json_and_equal_for_equal_runs(site: Path) -> None:
    plugin(site, "good", BUILD_LOSS + "@hookimpl\ndef on_plan(plan): pass\n")
    file = write_module(site, "one", HEADER + "@hookimpl\ndef on_step_end(step): pass\n")
    used = [Component("hp.losses", "focal", "acme:F", "acme", "1.0")] * 2
    documents = [json.dumps(provenance(load(["good", "one.py"], site), used), sort_keys=True) for _ in range(2)]
    assert documents[0] == documents[1]
    assert json.loads(documents[0]) == {
        "plugins": [
            {
                "name": "good",
                "distribution": "good-dist",
                "version": "1.0",
                "source": "fake_good",
                "sha256": None,
                "hooks": ["on_plan", "build_loss"],
            },
            {
                "name": "one.py",
                "distribution": None,
                "version": None,
                "source": str(file.resolve()),
                "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
                "hooks": ["on_step_end"],
            },
        ],
        "components": [
            {"group": "hp.losses", "name": "focal", "value": "acme:F", "distribution": "acme", "version": "1.0"}
        ],
    }


def test_loading_plugins_imports_neither_torch_nor_transformers(site: Path) -> None:
    plugin(site, "good", BUILD_LOSS)
    code = (
        "import sys, pathlib; from hp_core.plugins import load_plugins;"
        "load_plugins(['good'], base_dir=pathlib.Path());"
        "print(sorted({'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(site), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
