from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from hp_core.errors import Origin
from tests.fakes import install, on_path
from tests.plugin_fakes import BUILD_LOSS, HEADER, load, plugin, refuse

VERSION = version("hyperparallel")
HOST = f"hyperparallel {VERSION}"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "site"
    path.mkdir()
    with on_path(path):
        yield path


REFUSED = {
    "misspelt": (
        "@hookimpl\ndef bild_loss(config):\n    return 1\n",
        [f"the hookimpl 'bild_loss' is no hook of {HOST}; did you mean 'build_loss'?"],
    ),
    "misspelt beyond recognition": (
        "@hookimpl\ndef xyz(config):\n    return 1\n",
        [f"the hookimpl 'xyz' is no hook of {HOST}; hooks: build_model, replace_module, on_plan, "],
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
