"""Every file of a checkpoint is known by size and hash, and any damage is found before it is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import hp_core.checkpoint.integrity as integrity
from hp_core.checkpoint.integrity import FileRecord, hash_of, shares
from hp_core.checkpoint.layout import FILES, METADATA, TRAINER_STATE
from hp_core.checkpoint.saver import Saver, save_checkpoint
from hp_core.checkpoint.verify import problem_with, remark_on
from hp_core.testing.ranks import run_ranks
from tests.checkpoint.helpers import Trained, checkpoint_at, same, settings
from tests.model.tiny import a_setup


def save_on_ranks(environment: Any, run: str, in_background: bool) -> str:
    with a_setup(environment) as setup:
        saver = Saver(Path(run), settings(**{"async": in_background}), setup)
        return str((saver.start(Trained(setup).contents()) + saver.finish())[0])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint of two ranks."""
    return Path(run_ranks(save_on_ranks, 2, str(tmp_path_factory.mktemp("run")), False)[0])


@pytest.fixture
def path(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / written.name))


def problem(path: Path) -> str | None:
    with a_setup() as setup:
        return problem_with(checkpoint_at(path), setup)


@pytest.mark.parametrize("in_background", [False, True])
def test_every_file_is_listed_as_it_is(tmp_path, in_background):
    path = Path(run_ranks(save_on_ranks, 2, str(tmp_path), in_background)[0])
    listed = json.loads((path / FILES).read_text())["files"]
    there = {file.name: file for file in path.iterdir() if file.name != FILES}
    assert set(listed) == set(there) >= {METADATA, TRAINER_STATE, "__0_0.distcp", "__1_0.distcp", "rank_00001.pt"}
    for name, file in there.items():
        data = file.read_bytes()
        assert listed[name] == {"size": len(data), "xxh3": xxhash.xxh3_128_hexdigest(data)}
    assert problem(path) is None
    assert remark_on(checkpoint_at(path)) is None


def damaged(kind: str, file: Path) -> None:
    data = file.read_bytes()
    if kind == "removed":
        file.unlink()
    elif kind == "truncated":
        file.write_bytes(data[:-1])
    elif kind == "zeroed":
        file.write_bytes(bytes(len(data)))
    elif kind == "a bit":
        file.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
    elif kind == "longer":
        file.write_bytes(data + b"\0")


FOUND = {
    "removed": " is missing",
    "truncated": "bytes",
    "zeroed": "is not what was written",
    "a bit": "is not what was written",
    "longer": "bytes",
}


@pytest.mark.parametrize("name", ["__1_0.distcp", "rank_00001.pt", "__0_0.distcp"])
@pytest.mark.parametrize("kind", FOUND)
def test_damage_is_found(path, name, kind):
    damaged(kind, path / name)
    found = problem(path)
    assert found is not None
    assert found.startswith(name)
    assert FOUND[kind] in found


def test_swapped_files_are_found(path):
    one, other = path / "__0_0.distcp", path / "__1_0.distcp"
    one.rename(path / "x")
    other.rename(one)
    (path / "x").rename(other)
    found = problem(path)
    assert found is not None
    assert found.startswith("__0_0.distcp")


def test_a_file_of_another_checkpoint_is_found(path, tmp_path):
    with a_setup() as setup:
        other = save_checkpoint(tmp_path / "other", Trained(setup, steps=2).contents(), setup)
    shutil.copy(other / "rank_00000.pt", path / "rank_00001.pt")
    assert "rank_00001.pt" in str(problem(path))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"files": {"a": 1}}', '{"files": {"a": {"size": "x", "xxh3": ""}}}'])
def test_a_damaged_list_is_found(path, text):
    (path / FILES).write_text(text)
    assert FILES in str(problem(path))


def test_a_missing_list_is_found_where_there_has_to_be_one(path):
    (path / FILES).unlink()
    assert problem(path) == "incomplete: files.json is missing"


def test_a_link_out_of_the_checkpoint_is_found(path, tmp_path):
    file = path / "__1_0.distcp"
    shutil.copy(file, tmp_path / "elsewhere")
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    assert "'__1_0.distcp' is not in the checkpoint" in str(problem(path))


# Checkpoints from before there was a list.


def made_older(path: Path) -> None:
    (path / FILES).unlink()
    state = json.loads((path / TRAINER_STATE).read_text())
    for key in ("format", "places", "optimizer_state"):
        del state[key]
    (path / TRAINER_STATE).write_text(json.dumps(state))
    import torch

    for file in list(path.glob("rank_*.pt")):
        kept = torch.load(file, weights_only=True)
        torch.save(kept["random"], path / f"random_{file.name}")
        torch.save(kept["loss"], path / f"loss_{file.name}")
        file.unlink()


def test_an_older_checkpoint_loads_and_says_that_it_can_t_be_verified(path):
    with a_setup() as setup:
        wanted = Trained(setup, steps=0)
        wanted.load(path)
        made_older(path)
        assert problem_with(checkpoint_at(path), setup) is None
        assert remark_on(checkpoint_at(path)) == f"{path} was written without files.json: its files can't be verified"
        again = Trained(setup, steps=2)
        restored = again.load(path)
    assert restored.new_ranks == (0,)
    assert same(again.tensors(), wanted.tensors())


@pytest.mark.parametrize(
    ("kind", "found"), [("removed", "__1_0.distcp is missing"), ("truncated", "__1_0.distcp has ")]
)
def test_what_can_be_seen_of_an_older_one_is(path, kind, found):
    made_older(path)
    damaged(kind, path / "__1_0.distcp")
    assert str(problem(path)).startswith(found)


# Sharing the work.


@given(st.dictionaries(st.text(min_size=1), st.integers(0, 100)), st.integers(1, 5))
def test_each_file_is_hashed_once_and_the_bytes_are_shared(sizes, num_ranks):
    records = {name: FileRecord(size, "") for name, size in sizes.items()}
    found = shares(records, num_ranks)
    assert len(found) == num_ranks
    assert sorted(name for names in found for name in names) == sorted(sizes)
    loads = [sum(sizes[name] for name in names) for names in found]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def verify_on_ranks(environment: Any, path: str) -> tuple[list[str], str | None]:
    hashed: list[str] = []

    def noted(file: Path) -> str:
        hashed.append(file.name)
        return hash_of(file)

    integrity.hash_of = noted
    with a_setup(environment) as setup:
        return hashed, problem_with(checkpoint_at(Path(path)), setup)


def test_ranks_share_the_files_and_agree(path):
    results = run_ranks(verify_on_ranks, 2, str(path))
    assert [problem for _, problem in results] == [None, None]
    assert all(hashed for hashed, _ in results)
    assert sorted(name for hashed, _ in results for name in hashed) == sorted(
        file.name for file in path.iterdir() if file.name != FILES
    )
    damaged("a bit", path / "__1_0.distcp")
    results = run_ranks(verify_on_ranks, 2, str(path))
    assert {problem for _, problem in results} == {"__1_0.distcp is not what was written: another hash"}
