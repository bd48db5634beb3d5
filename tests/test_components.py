from __future__ import annotations

import pickle
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest

from hp_core.components import GROUPS, Component, ComponentLoadError, Components, group
from hp_core.entry_points import choose, scan
from hp_core.errors import EXIT_USER_INPUT, InputError
from tests.fakes import environment, install, install_source_tree, on_path

ACME = Component("hp.losses", "focal", "acme.losses:Focal", "acme", "1.0")
ZETA = Component("hp.losses", "focal", "zeta:Focal", "zeta", "2.1")
PLAIN = Component("hp.losses", "causal_lm", "acme.losses:Plain", "acme", "1.0")


def message(error: pytest.ExceptionInfo[InputError]) -> str:
    return str(error.value)


# --- groups


def test_each_group_has_its_section_and_the_arguments_of_the_design() -> None:
    assert len({one.name for one in GROUPS}) == len({one.section for one in GROUPS}) == len(GROUPS) == 13
    assert group("hp.losses").section == "loss_fn"
    assert group("hp.losses").runtime_arguments == ()
    assert group("hp.optimizers").runtime_arguments == ("model",)
    assert group("hp.lr_schedulers").runtime_arguments == ("optimizer", "train_iters")
    assert group("hp.datasets").runtime_arguments == ("transform", "tokenizer", "mesh_context", "training_config")
    assert group("hp.trackers").runtime_arguments == ("run_dir", "config", "first_step", "recipe", "run_names")


def test_an_unknown_group_is_a_bug_of_the_caller() -> None:
    with pytest.raises(KeyError):
        group("hp.loss")


# --- finding


def test_a_unique_name_is_found_plain_and_qualified() -> None:
    components = Components([ACME, PLAIN, ZETA])
    assert components.find("hp.losses", "causal_lm") is PLAIN
    assert components.find("hp.losses", "acme:causal_lm") is PLAIN
    assert components.find("hp.losses", "Acme:causal_lm") is PLAIN


def test_a_clash_names_both_distributions_and_the_spellings_that_settle_it() -> None:
    for order in permutations([ACME, PLAIN, ZETA]):
        components = Components(order)
        with pytest.raises(InputError) as error:
            components.find("hp.losses", "focal")
        assert message(error) == (
            "acme 1.0 and zeta 2.1 each offer a loss_fn component named 'focal'; write 'acme:focal' or 'zeta:focal'"
        )
        assert components.find("hp.losses", "zeta:focal") == ZETA
        assert components.find("hp.losses", "acme:focal") == ACME
        assert components.names("hp.losses") == ("acme:focal", "causal_lm", "zeta:focal")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("causl_lm", "no loss_fn component is named 'causl_lm'; did you mean 'causal_lm'? installed: causal_lm"),
        ("zebra", "no loss_fn component is named 'zebra'; installed: causal_lm"),
        (
            "other:causal_lm",
            "no loss_fn component is named 'other:causal_lm': the package 'other' is not installed; "
            "pip install other, or did you mean 'acme:causal_lm'?",
        ),
        (
            "other-losses:focal",
            "no loss_fn component is named 'other-losses:focal': the package 'other-losses' is not installed; "
            "pip install other-losses",
        ),
        ("Acme:causl", "the package 'Acme' offers no loss_fn component 'causl'; did you mean 'causal_lm'? it offers "),
        ("acme:zebra", "the package 'acme' offers no loss_fn component 'zebra'; it offers causal_lm"),
        ("pytest:focal", "no loss_fn component is named 'pytest:focal'; installed: causal_lm"),
        ("rm -r x:focal", "no loss_fn component is named 'rm -r x:focal'; installed: causal_lm"),
        ("acme", "no loss_fn component is named 'acme'; did you mean 'acme:causal_lm'? installed: causal_lm"),
        ("", "no loss_fn component is named ''; installed: causal_lm"),
    ],
)
def test_an_unknown_name_gets_the_nearest_one_and_the_list(name: str, text: str) -> None:
    with pytest.raises(InputError) as error:
        Components([PLAIN]).find("hp.losses", name)
    assert message(error).startswith(text)
    assert error.value.exit_code == EXIT_USER_INPUT


def test_a_name_of_another_group_is_not_found_and_an_empty_group_says_so() -> None:
    with pytest.raises(InputError) as error:
        Components([PLAIN]).find("hp.optimizers", "causal_lm")
    assert message(error) == "no optimizer component is named 'causal_lm'; none is installed"


def test_one_distribution_offering_a_name_twice_is_told_so() -> None:
    twin = Component("hp.losses", "focal", "acme.other:Focal", "acme", "1.0")
    with pytest.raises(InputError) as error:
        Components([ACME, twin]).find("hp.losses", "focal")
    assert (
        message(error)
        == "acme 1.0 offers the loss_fn component 'focal' twice, as 'acme.losses:Focal' and 'acme.other:Focal'"
    )


# --- loading


def test_load_imports_the_attribute_or_the_module(tmp_path: Path) -> None:
    install(tmp_path, "acme", entry_points={}, modules={"fake_load": "class Outer:\n    class Inner: size = 3\n"})
    with on_path(tmp_path):
        assert Component("hp.losses", "x", "fake_load:Outer.Inner", "acme", "1.0").load().size == 3
        assert Component("hp.losses", "x", "fake_load", "acme", "1.0").load().__name__ == "fake_load"
        assert Component("hp.losses", "x", "fake_load:Outer [extra]", "acme", "1.0").load().__name__ == "Outer"


@pytest.mark.parametrize(
    ("source", "value", "cause"),
    [
        ("import nowhere_at_all", "fake_broken:Loss", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("Loss = 1", "fake_absent:Loss", "ModuleNotFoundError: No module named 'fake_absent'"),
        ("Loss = 1", "fake_broken:Los", "AttributeError: module 'fake_broken' has no attribute 'Los'"),
        ("def f(:", "fake_broken:Loss", "SyntaxError: invalid syntax"),
        ("raise RuntimeError('two\\nlines')", "fake_broken:Loss", "RuntimeError: two lines"),
        ("import sys; sys.exit(0)", "fake_broken:Loss", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "fake_broken", None),
        ("Loss = 1", ":Loss", "ValueError: Empty module name"),
    ],
)
def test_a_broken_component_names_its_distribution_entry_point_and_cause(
    tmp_path: Path, source: str, value: str, cause: str | None
) -> None:
    install(tmp_path, "acme", entry_points={}, modules={"fake_broken": source})
    component = Component("hp.losses", "focal", value, "acme", "1.0")
    with on_path(tmp_path):
        if cause is None:
            with pytest.raises(KeyboardInterrupt):
                component.load()
            return
        with pytest.raises(ComponentLoadError) as error:
            component.load()
    text = str(error.value)
    assert text.startswith(f"acme 1.0: entry point 'focal = {value}' of hp.losses can't be loaded: {cause}")
    assert "\n" not in text
    assert error.value.exit_code == EXIT_USER_INPUT
    assert error.value.__cause__ is error.value.cause
    assert error.value.problem.message == text


def test_a_load_error_survives_pickling() -> None:
    error = ComponentLoadError(ACME, ImportError("no"))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# --- discovery


def test_discovery_reads_names_and_versions_and_imports_nothing(tmp_path: Path) -> None:
    install(
        tmp_path,
        "acme-losses",
        "1.2",
        entry_points={"hp.losses": {"bomb": "fake_bomb:Loss"}, "console_scripts": {"acme": "fake_bomb:main"}},
        modules={"fake_bomb": "raise RuntimeError('imported')"},
    )
    with on_path(tmp_path):
        found = Components.discover()
        assert Component("hp.losses", "bomb", "fake_bomb:Loss", "acme-losses", "1.2") in found.all()
        assert "fake_bomb" not in sys.modules
        assert found.find("hp.losses", "acme_losses:bomb").version == "1.2"
    assert not [one for one in found.all() if one.group == "console_scripts"]


def test_our_own_components_are_discovered_once() -> None:
    ours = [one for one in Components.discover().all() if one.distribution == "hyperparallel"]
    assert len(ours) == len({(one.group, one.name) for one in ours})
    assert ("hp.losses", "causal_lm") in {(one.group, one.name) for one in ours}


def test_the_result_does_not_depend_on_the_order_of_the_path(tmp_path: Path) -> None:
    sites = [tmp_path / name for name in ("one", "two", "three")]
    install(sites[0], "acme", entry_points={"hp.losses": {"focal": "a:F"}})
    install(sites[1], "zeta", entry_points={"hp.losses": {"focal": "z:F"}, "hp.optimizers": {"lion": "z:L"}})
    install(sites[2], "acme", entry_points={"hp.losses": {"focal": "a:F"}})
    seen = set()
    for order in permutations(sites):
        with on_path(*order):
            seen.add(Components.discover().all())
    assert len(seen) == 1
    fakes = [one for one in seen.pop() if one.distribution in ("acme", "zeta")]
    assert [one.qualified_name for one in fakes] == ["acme:focal", "zeta:focal", "zeta:lion"]


def test_an_editable_install_next_to_its_source_tree_counts_once(tmp_path: Path) -> None:
    tree, site = tmp_path / "tree", tmp_path / "site"
    install_source_tree(tree, "acme", "1.0", entry_points={"hp.losses": {"old": "a:F"}})
    install(site, "acme", "1.0", entry_points={"hp.losses": {"focal": "a:F"}})
    for order in ((tree, site), (site, tree)):
        with on_path(*order):
            names = [one.name for one in Components.discover().all() if one.distribution == "acme"]
        assert names == ["focal"]


def test_of_two_versions_the_one_that_would_be_imported_counts(tmp_path: Path) -> None:
    sites = [tmp_path / "new", tmp_path / "old"]
    install(sites[0], "acme", "2.0", entry_points={"hp.losses": {"focal": "a:F"}})
    install(sites[1], "acme", "1.0", entry_points={"hp.losses": {"focal": "a:F"}})
    for order in permutations(sites):
        with on_path(*order):
            versions = [one.version for one in Components.discover().all() if one.distribution == "acme"]
        assert versions == ["2.0" if order[0] is sites[0] else "1.0"]


def test_the_leftover_of_an_upgrade_in_one_directory_is_passed_over(tmp_path: Path) -> None:
    for version in ("1.9", "1.10", "1.2"):
        install(tmp_path, "acme", version, entry_points={"hp.losses": {"focal": "a:F"}})
    with on_path(tmp_path):
        versions = [one.version for one in Components.discover().all() if one.distribution == "acme"]
    assert versions == ["1.10"]


def test_a_newer_version_that_offers_nothing_hides_the_older_one(tmp_path: Path) -> None:
    install(tmp_path / "new", "acme", "2.0", entry_points={})
    install(tmp_path / "old", "acme", "1.0", entry_points={"hp.losses": {"focal": "a:F"}})
    with on_path(tmp_path / "new", tmp_path / "old"):
        assert not [one for one in Components.discover().all() if one.distribution == "acme"]


def test_a_directory_named_unlike_its_distribution_is_still_read(tmp_path: Path) -> None:
    install(tmp_path, "acme", entry_points={"hp.losses": {"focal": "a:F"}})
    (tmp_path / "acme-1.0.dist-info").rename(tmp_path / "renamed-1.0.dist-info")
    with on_path(tmp_path):
        assert "acme:focal" in [one.qualified_name for one in Components.discover().all()]


def test_a_distribution_with_unreadable_entry_points_hides_no_other(tmp_path: Path) -> None:
    install(tmp_path, "broken", "0.3", entry_points="[hp.losses]\nfocal, no equals sign\n")
    install(tmp_path, "acme", entry_points={"hp.losses": {"focal": "a:F"}})
    (tmp_path / "latin-1.0.dist-info").mkdir()
    (tmp_path / "latin-1.0.dist-info" / "entry_points.txt").write_bytes(b"[hp.losses]\nf\xe9 = a:F\n")
    with on_path(tmp_path):
        found = scan()
    assert "acme:focal" in [one.qualified_name for one in found.entries]
    assert len(found.unreadable) == 2
    assert any(text.startswith("broken: the metadata can't be read: ") for text in found.unreadable)
    assert any("UnicodeDecodeError" in text for text in found.unreadable)


def test_metadata_without_a_name_is_reported_and_without_a_version_is_read(tmp_path: Path) -> None:
    for name, metadata in (("bare", ""), ("acme", "Name: acme\n")):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(metadata)
        (info / "entry_points.txt").write_text("[hp.losses]\nfocal = a:F\n")
    with on_path(tmp_path):
        found = scan()
    assert [(one.distribution, one.version) for one in found.entries if one.value == "a:F"] == [("acme", "unknown")]
    assert [text for text in found.unreadable if "no name" in text and str(tmp_path) in text] == list(found.unreadable)
    assert len(found.unreadable) == 1


def test_reading_components_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    install(tmp_path, "acme", entry_points={"hp.losses": {"focal": "torch:nn"}})
    code = (
        "import sys; from hp_core.components import Components; from hp_core.plugins import InstalledPlugins;"
        "print(len(Components.discover().all()) > 0, InstalledPlugins.discover().names(),"
        "sorted({'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "()", "[]"]


def test_choose_takes_any_kind() -> None:
    with pytest.raises(InputError, match="no plugin is named 'x'; none is installed"):
        choose([], "x", "plugin")
