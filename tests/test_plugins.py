from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from hp_core.components import Component
from hp_core.errors import EXIT_USER_INPUT, InputError, Origin, RunError
from hp_core.hookspecs import hookimpl
from hp_core.plugin_guard import PluginError
from hp_core.plugins import InstalledPlugins, Plugins, load_plugins, provenance
from tests.fakes import environment, install, on_path, write_module

VERSION = version("hyperparallel")
HOST = f"hyperparallel {VERSION}"

HEADER = "from hp_core.hookspecs import hookimpl\n"


def plugin(site: Path, name: str, source: str, number: str = "1.0", **options: Any) -> None:
    """Install the distribution `<name>-dist`, whose plugin `name` is the module `fake_<name>`."""
    entry_points = {"hp.plugins": {name: f"fake_{name}"}}
    modules = {f"fake_{name}": HEADER + source}
    install(site, f"{name}-dist", number, entry_points=entry_points, modules=modules, **options)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "site"
    path.mkdir()
    with on_path(path):
        yield path


def load(names: list[str], site: Path, **options: Any) -> Plugins:
    return load_plugins(names, base_dir=site, **options)


def refuse(names: list[str], site: Path, **options: Any) -> list[str]:
    with pytest.raises(InputError) as error:
        load(names, site, **options)
    assert error.value.exit_code == EXIT_USER_INPUT
    return [str(problem) for problem in error.value.problems]


class Defaults:
    @hookimpl(trylast=True)
    def build_loss(self, config: Any) -> Any:
        return f"default loss of {config}"

    @hookimpl
    def on_step_end(self, run: Any, step: Any) -> None:
        run.append("default")


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


# --- one-file plugins


def test_a_one_file_plugin_is_relative_to_the_recipe_and_leaves_the_path_alone(site: Path, tmp_path: Path) -> None:
    recipes = tmp_path / "recipes"
    source = HEADER + (
        "from __future__ import annotations\nimport dataclasses\n"
        "@dataclasses.dataclass\nclass State:\n    value: dataclasses.InitVar[int] = 3\n"
        "@hookimpl\ndef build_loss(config):\n    return State.__module__\n"
    )
    source = "from __future__ import annotations\n" + source.replace("from __future__ import annotations\n", "")
    file = write_module(recipes, "my-loss", source)
    before = list(sys.path)
    plugins = load(["my-loss.py"], recipes)
    assert sys.path == before
    assert not list(recipes.glob("__pycache__"))
    module = plugins.hook.build_loss(config="c")
    assert module.startswith("hp_plugin_file_my_loss_")
    assert sys.modules[module].__file__ == str(file)
    [record] = plugins.records
    assert (record.name, record.distribution, record.version) == ("my-loss.py", None, None)
    assert record.source == str(file.resolve())
    assert record.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_changed_file_is_read_anew_at_once(site: Path) -> None:
    for result in (1, 2):
        write_module(site, "one", f"{HEADER}@hookimpl\ndef build_loss(config):\n    return {result}\n")
        assert load(["./one.py"], site).hook.build_loss(config="c") == result


def test_files_of_one_name_in_two_directories_are_two_plugins(site: Path) -> None:
    for directory in ("a", "b"):
        write_module(
            site, f"{directory}.one", f"{HEADER}@hookimpl\ndef on_plan(plan):\n    plan.append('{directory}')\n"
        )
    plan: list[str] = []
    load(["a/one.py", str(site / "b" / "one.py")], site).hook.on_plan(plan=plan)
    assert plan == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("onee.py", "there is no file '{site}/onee.py'; did you mean 'one.py'?"),
        ("nowhere/one.py", "there is no file '{site}/nowhere/one.py'"),
        ("./one", "a one-file plugin is a .py file, and './one' isn't one"),
        ("one", "no plugin is named 'one'; did you mean 'one.py'?"),
        ("broken.py", "{site}/broken.py:3 can't be loaded: ZeroDivisionError: division by zero"),
        ("syntax.py", "{site}/syntax.py:1 can't be loaded: SyntaxError: invalid syntax (syntax.py, line 1)"),
        ("exit.py", "{site}/exit.py:1 can't be loaded: SystemExit: 0"),
    ],
)
def test_a_file_that_is_not_there_or_does_not_load_says_where(site: Path, name: str, expected: str) -> None:
    write_module(site, "one", "")
    write_module(site, "broken", "def f():\n    return 1\nx = f() / 0\n")
    write_module(site, "syntax", "def f(:\n")
    write_module(site, "exit", "raise SystemExit(0)\n")
    before = set(sys.modules)
    assert refuse([name], site) == ["plugins[0]: " + expected.format(site=site.resolve())]
    assert not [one for one in set(sys.modules) - before if one.startswith("hp_plugin_file")]


# --- what is refused


BUILD_LOSS = "@hookimpl\ndef build_loss(config):\n    return 1\n"

REFUSED = {
    "misspelt": (
        "@hookimpl\ndef bild_loss(config):\n    return 1\n",
        [f"the hookimpl 'bild_loss' is no hook of {HOST}; did you mean 'build_loss'?"],
    ),
    "misspelt beyond recognition": (
        "@hookimpl\ndef xyz(config):\n    return 1\n",
        [f"the hookimpl 'xyz' is no hook of {HOST}; hooks: on_plan, build_model, "],
    ),
    "undecorated": (
        "def build_loss(config):\n    return 1\n",
        ["the function 'build_loss' is named like a hook but isn't decorated; decorate it with @hookimpl"],
    ),
    "undecorated beside a good one": (
        BUILD_LOSS + "def on_plan(plan):\n    pass\n",
        ["the function 'on_plan' is named like a hook but isn't decorated"],
    ),
    "undecorated and misspelt": (
        "def on_stepend(run, step):\n    pass\n",
        ["the function 'on_stepend' looks like the hook 'on_step_end' but isn't decorated"],
    ),
    "marked by pytest": (
        "from pytest import hookimpl as other\n@other\ndef build_loss(config):\n    return 1\n",
        ["the function 'build_loss' is named like a hook but isn't decorated"],
    ),
    "argument the host lacks": (
        "@hookimpl\ndef build_loss(config, model):\n    return 1\n",
        [f"the hookimpl 'build_loss' takes 'model', which {HOST} doesn't provide; the hook is build_loss(config)"],
    ),
    "argument with a default": (
        "@hookimpl\ndef build_loss(config=None):\n    return 1\n",
        ["the hookimpl 'build_loss' gives 'config' a default, which would hide the host's value; remove the default"],
    ),
    "arguments pluggy never passes": (
        "@hookimpl\ndef build_loss(*args, config, **kwargs):\n    return 1\n",
        [
            "the hookimpl 'build_loss' takes '*args', which hooks never receive; list plain arguments",
            "the hookimpl 'build_loss' takes 'config', which hooks never receive",
            "the hookimpl 'build_loss' takes '**kwargs', which hooks never receive",
        ],
    ),
    "no hookimpl": ("x = 1\n", ["has no hookimpl; decorate its functions with @hookimpl from hp_core.hookspecs"]),
    "an order of its own": (
        "@hookimpl(tryfirst=True, trylast=True)\ndef build_loss(config):\n    return 1\n",
        ["the hookimpl 'build_loss' sets tryfirst; the order of plugins", "the hookimpl 'build_loss' sets trylast"],
    ),
    "an optional hook": (
        "@hookimpl(optionalhook=True)\ndef build_loss(config):\n    return 1\n",
        ["the hookimpl 'build_loss' sets optionalhook, which hides a misspelt name"],
    ),
    "an old-style wrapper": (
        "@hookimpl(hookwrapper=True)\ndef build_loss(config):\n    yield\n",
        ["the hookimpl 'build_loss' is an old-style wrapper; use hookimpl(wrapper=True)"],
    ),
    "a wrapper without yield": (
        "@hookimpl(wrapper=True)\ndef build_loss(config):\n    return 1\n",
        ["the wrapper 'build_loss' doesn't yield"],
    ),
    "a generator that is no wrapper": (
        "@hookimpl\ndef build_loss(config):\n    yield\n",
        ["the hookimpl 'build_loss' yields but is no wrapper; use hookimpl(wrapper=True)"],
    ),
    "async": ("@hookimpl\nasync def build_loss(config):\n    return 1\n", ["the hookimpl 'build_loss' is async"]),
    "a cached function": (
        "import functools\n@functools.lru_cache\n@hookimpl\ndef build_loss(config):\n    return 1\n",
        ["the hookimpl 'build_loss' is a _lru_cache_wrapper; decorate a plain function"],
    ),
    "one hook twice": (
        BUILD_LOSS + "@hookimpl(specname='build_loss')\ndef other(config):\n    return 2\n",
        ["implements 'build_loss' 2 times; keep one function for each hook"],
    ),
    "an older range": (
        "hp_requires = '>=0.0.1,<0.1'\n" + BUILD_LOSS.replace("config", "removed_argument"),
        [f"needs hyperparallel <0.1,>=0.0.1, and this is {VERSION}; install a version of it made for this one"],
    ),
    "a newer range": ("hp_requires = '>=99'\n" + BUILD_LOSS, [f"needs hyperparallel >=99, and this is {VERSION}"]),
    "no range at all": (
        "hp_requires = 'new'\n" + BUILD_LOSS,
        ["hp_requires is 'new', which is no version range; write it as '>=0.1,<0.2'"],
    ),
    "a broken import": (
        "import nowhere_at_all\n",
        [
            "entry point 'bad = fake_bad' of hp.plugins can't be loaded: "
            "ModuleNotFoundError: No module named 'nowhere_at_all'"
        ],
    ),
    "raising while imported": (
        "raise RuntimeError('no GPU')\n",
        ["entry point 'bad = fake_bad' of hp.plugins can't be loaded: RuntimeError: no GPU"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_plugin_is_refused_with_its_distribution_version_and_cause(site: Path, case: str) -> None:
    source, expected = REFUSED[case]
    plugin(site, "bad", source, number="3.2")
    origin = Origin(file="recipe.yaml", line=4, column=5)
    problems = refuse(["bad"], site, origins={"plugins[0]": origin})
    assert len(problems) == len(expected)
    for problem, text in zip(problems, expected, strict=True):
        assert problem.startswith("recipe.yaml:4:5: plugins[0]: ")
        assert "bad-dist 3.2" in problem
        assert text in problem


def test_helpers_are_not_taken_for_hooks(site: Path) -> None:
    source = (
        "from tests.test_hookspecs import test_pluggy_itself_accepts_the_specifications as build_model\n"
        "def replace_modules(model, names): pass\ndef _build_optimizer(config, model): pass\n"
        "def build_losses_for_everything(config): pass\n" + BUILD_LOSS
    )
    plugin(site, "good", source)
    assert load(["good"], site).records[0].hooks == ("build_loss",)


def test_a_plugin_inside_its_declared_range_is_loaded(site: Path) -> None:
    plugin(site, "good", "hp_requires = '>=0.0.1'\n" + BUILD_LOSS, requires=("hyperparallel>=0.0.1,<99", "torch"))
    assert load(["good"], site).records[0].hooks == ("build_loss",)


def test_the_range_in_the_distributions_metadata_counts_too(site: Path) -> None:
    plugin(
        site, "old", "raise RuntimeError('not even imported')\n", requires=("HyperParallel<0.1", "not a requirement!")
    )
    assert refuse(["old"], site) == [
        f"plugins[0]: plugin 'old' (old-dist 1.0): needs hyperparallel <0.1, and this is {VERSION}; "
        "install a version of it made for this one"
    ]


def test_a_class_is_no_plugin(site: Path) -> None:
    install(
        site,
        "classy",
        entry_points={"hp.plugins": {"classy": "fake_classy:P"}},
        modules={"fake_classy": HEADER + "class P:\n    @hookimpl\n    def build_loss(self, config): return 1\n"},
    )
    [problem] = refuse(["classy"], site)
    assert "plugin 'classy' (classy 1.0): is a class; let the entry point name a module or an instance" in problem


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
    for name, case in enumerate(REFUSED.values()):
        plugin(site, f"bad{name}", case[0])
    assert load(["good"], site).hook.build_loss(config="c") == 1
    assert not [name for name in sys.modules if name.startswith("fake_bad")]


# --- while it runs


def test_an_exception_names_the_plugin_and_keeps_the_cause(site: Path) -> None:
    plugin(site, "bad", "@hookimpl\ndef build_loss(config):\n    raise ValueError(f'no {config}')\n", number="1.2")
    with pytest.raises(PluginError) as error:
        load(["bad"], site, defaults=[Defaults()]).hook.build_loss(config="head")
    assert str(error.value) == "plugin 'bad' (bad-dist 1.2): build_loss raised ValueError: no head"
    assert isinstance(error.value.__cause__, ValueError)
    assert isinstance(error.value, RunError)


def test_a_plugin_cannot_end_the_run_quietly(site: Path) -> None:
    plugin(site, "bad", "import sys\n@hookimpl\ndef on_plan(plan):\n    sys.exit(0)\n")
    with pytest.raises(PluginError, match=r"on_plan raised SystemExit: 0$"):
        load(["bad"], site).hook.on_plan(plan=1)


def test_an_hp_error_and_an_interrupt_pass_unchanged(site: Path) -> None:
    source = "from hp_core.errors import InputError\n@hookimpl\ndef on_plan(plan):\n    raise InputError('too big')\n"
    plugin(site, "strict", source + "@hookimpl\ndef on_train_start(run):\n    raise KeyboardInterrupt\n")
    hook = load(["strict"], site).hook
    with pytest.raises(InputError, match=r"^too big$"):
        hook.on_plan(plan=1)
    with pytest.raises(KeyboardInterrupt):
        hook.on_train_start(run=1)


WRAPPER = "@hookimpl(wrapper=True)\ndef build_loss(config):\n"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("    raise ValueError(1)\n    yield\n", "build_loss raised ValueError: 1"),
        ("    yield\n    raise ValueError(2)\n", "build_loss raised ValueError: 2"),
        ("    yield\n    yield\n", "build_loss yielded more than once"),
        ("    if config:\n        return 1\n    yield\n", "build_loss returned without a yield"),
        ("    yield\n", "build_loss returned None instead of the result that it got from yield"),
    ],
)
def test_a_wrapper_that_fails_or_drops_the_result_is_named(site: Path, body: str, text: str) -> None:
    plugin(site, "w", WRAPPER + body)
    with pytest.raises(PluginError) as error:
        load(["w"], site, defaults=[Defaults()]).hook.build_loss(config="c")
    assert str(error.value) == f"plugin 'w' (w-dist 1.0): {text}"


class Failing:
    @hookimpl
    def build_loss(self, config: Any) -> Any:
        raise OSError(config)


def test_what_fails_inside_a_wrapper_is_not_blamed_on_it(site: Path) -> None:
    plugin(site, "w", WRAPPER + "    try:\n        return (yield)\n    finally:\n        config.append('cleaned up')\n")
    plugin(site, "bad", "@hookimpl\ndef build_loss(config):\n    return 1 / 0\n")
    config: list[str] = []
    with pytest.raises(OSError, match="cleaned up"):
        load(["w"], site, defaults=[Failing()]).hook.build_loss(config=config)
    with pytest.raises(PluginError, match=r"^plugin 'bad' .*ZeroDivisionError"):
        load(["w", "bad"], site).hook.build_loss(config=config)
    assert config == ["cleaned up"] * 2


def test_a_wrapper_may_rescue_or_translate_a_failure(site: Path) -> None:
    rescue = WRAPPER + "    try:\n        return (yield)\n    except OSError as error:\n        "
    plugin(site, "rescue", rescue + "return 'rescued'\n")
    plugin(site, "translate", rescue + "raise ValueError('translated') from error\n")
    assert load(["rescue"], site, defaults=[Failing()]).hook.build_loss(config="c") == "rescued"
    with pytest.raises(PluginError, match=r"^plugin 'translate' .*ValueError: translated$"):
        load(["translate"], site, defaults=[Failing()]).hook.build_loss(config="c")


def test_a_decorated_function_and_the_value_none_for_observers_are_fine(site: Path) -> None:
    source = """
import functools
def logged(function):
    @functools.wraps(function)
    def inner(*args): return function(*args)
    return inner
@hookimpl
@logged
def on_step_end(step, run): run.append(step)
@hookimpl(wrapper=True)
@logged
def on_plan(plan):
    plan.append("before")
    yield
    plan.append("after")
"""
    plugin(site, "good", source)
    hook = load(["good"], site).hook
    seen: list[Any] = []
    hook.on_step_end(run=seen, step=7)
    hook.on_plan(plan=seen)
    assert seen == [7, "before", "after"]


@pytest.mark.parametrize("arguments", [{}, {"config": 1, "model": 2}, {"confg": 1}])
@pytest.mark.filterwarnings("ignore:Argument.* which are declared in the hookspec:UserWarning")
def test_a_call_with_other_arguments_is_an_error(site: Path, arguments: dict[str, int]) -> None:
    plugin(site, "good", "@hookimpl\ndef build_loss():\n    return 1\n")
    with pytest.raises(TypeError, match=r"the hook build_loss\(config\) was called with \("):
        load(["good"], site).hook.build_loss(**arguments)


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
