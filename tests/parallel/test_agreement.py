"""Ranks with other recipes are told so at once, before they build anything together."""

from __future__ import annotations

import io
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from hp_core.config import load_recipe
from hp_core.config.digest import digests
from hp_core.errors import InputError
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.testing.ranks import run_ranks
from tests.e2e.runs import WITH_COMPONENTS, recipe, train_here

MEANT = {
    "a mesh": (["--accelerator.tp_size=2"], "accelerator.tp_size"),
    "a pipeline": (["--accelerator.pp_size=2"], "accelerator.pp_size"),
    "a component's argument": (["--optimizer.lr=0.5"], "optimizer.lr"),
    "a data set's argument": (["--dataset.num_rows=20"], "dataset.num_rows"),
    "a loader's argument": (["--dataloader.num_workers=1"], "dataloader.num_workers"),
    "another model": (["--model.config.hidden_size=64"], "model.config.hidden_size"),
    "two sections": (["--training.seed=4", "--checkpoint.save_every=2"], "checkpoint.save_every, training.seed"),
    "a time limit": (["--launch.timeout=1000"], "launch.timeout"),
    "a tracker": (["--trackers=[tensorboard]"], "trackers[0]"),
}


def refused(environment: ProcessEnvironment, path: str, overrides: list[str]) -> tuple[str, float]:
    """What a rank is told, and after how many seconds; the last of them is given other overrides."""
    own = overrides if environment.rank == environment.world_size - 1 else []
    started = time.monotonic()
    try:
        train_here(environment, path, own)
    except InputError as error:
        return str(error), time.monotonic() - started
    return "", 0.0


@pytest.mark.parametrize("name", MEANT)
def test_every_rank_is_told_what_differs_within_seconds(name: str, tmp_path: Path) -> None:
    """The recipe's own limit is half an hour."""
    overrides, sections = MEANT[name]
    told = run_ranks(refused, 2, str(recipe(tmp_path)), overrides, timeout=60)
    for text, seconds in told:
        assert text.startswith("recipes differ between ranks: rank 0 (on ")
        assert text.endswith(f") are given different {sections}")
        assert "rank 1 (on " in text
        assert seconds < 30
    assert not (tmp_path / "run").exists()


def trained(environment: ProcessEnvironment, path: str, output_dirs: list[str]) -> str:
    """What a rank says of a run for which each is given a directory of its own."""
    said = io.StringIO()
    with redirect_stdout(said):
        train_here(environment, path, [f"--output_dir={output_dirs[environment.rank]}", "--training.stop_after=1"])
    return said.getvalue()


def test_a_directory_that_is_not_heeded_is_told(tmp_path: Path) -> None:
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    first, second = run_ranks(trained, 2, str(recipe(tmp_path)), [one, other], preload=WITH_COMPONENTS)
    (line,) = [line for line in first.splitlines() if line.startswith("output_dir: ")]
    assert f"is given '{other}', which is not heeded: all write to '{one}', the directory of rank 0" in line
    assert second == ""
    assert (tmp_path / "one" / "manifest.json").exists()
    assert not (tmp_path / "other").exists()


def test_the_same_directory_in_other_words_is_not_told(tmp_path: Path) -> None:
    one, same = str(tmp_path / "one"), str(tmp_path / "there" / ".." / "one")
    first, _ = run_ranks(trained, 2, str(recipe(tmp_path)), [one, same], preload=WITH_COMPONENTS)
    assert "output_dir: " not in first


def test_ranks_hear_of_it_from_a_rank_that_ends_with_its_store(tmp_path: Path) -> None:
    """As under Slurm, where rank 0 has the store; of four ranks the last has another recipe."""
    for _ in range(3):
        told = run_ranks(refused, 4, str(recipe(tmp_path)), ["--training.seed=9"], timeout=120)
        assert len({text for text, _ in told}) == 1
        assert told[0][0].endswith("are given different training.seed")


def test_a_plugin_s_place_is_a_machine_s_own_business(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one.py").write_text("from hp_core import hookimpl\n")
    found = [
        digests(load_recipe(recipe(tmp_path), [f"--plugins=[{tmp_path / folder / 'one.py'}]"]).config)
        for folder in ("a", "b")
    ]
    assert found[0] == found[1]
    other = load_recipe(recipe(tmp_path), [f"--plugins=[{tmp_path / 'a' / 'two.py'}]"]).config
    assert digests(other)["plugins[0]"] != found[0]["plugins[0]"]


def test_where_a_rank_writes_is_its_own_business(tmp_path: Path) -> None:
    """A machine may have its disks elsewhere; rank 0 decides for all."""
    overrides = [f"--output_dir={tmp_path / 'elsewhere'}"]
    assert run_ranks(refused, 2, str(recipe(tmp_path)), overrides, timeout=120) == [("", 0.0)] * 2
    assert not (tmp_path / "elsewhere").exists()
