"""A checkpoint may come from anyone: nothing of it is run, and nothing outside of it is read."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from hp_core.checkpoint.layout import METADATA
from hp_core.checkpoint.reading import Reader, problem_of_shards, read_metadata
from hp_core.checkpoint.saver import save_checkpoint
from hp_core.errors import InputError
from tests.checkpoint.helpers import Trained, same
from tests.model.tiny import a_setup


class Malicious:
    """Touches a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


@pytest.fixture
def saved(tmp_path):
    with a_setup() as setup:
        run = Trained(setup)
        yield run, save_checkpoint(tmp_path / "run", run.contents(), setup)


def rewritten(path: Path, change: Any) -> None:
    metadata = read_metadata(path)
    change(metadata)
    (path / METADATA).write_bytes(pickle.dumps(metadata))


def test_torch_itself_would_run_it(saved, tmp_path):
    _, path = saved
    (path / METADATA).write_bytes(pickle.dumps(Malicious(tmp_path / "ran")))
    with pytest.raises(Exception, match="NoneType"):
        dcp.FileSystemReader(path).read_metadata()
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("where", ["all", "planner_data", "name", "protocol 0"])
def test_a_list_of_tensors_that_would_run_something_is_refused(saved, tmp_path, where):
    run, path = saved
    malicious = Malicious(tmp_path / "ran")
    if where == "all":
        (path / METADATA).write_bytes(pickle.dumps(malicious))
    elif where == "protocol 0":
        (path / METADATA).write_bytes(b"cposix\nmkdir\n(S'" + str(tmp_path / "ran").encode() + b"'\ntR.")
    elif where == "planner_data":
        rewritten(path, lambda one: setattr(one, "planner_data", malicious))
    else:
        rewritten(path, lambda one: one.storage_data.update({malicious: None}))
    for read in (lambda: run.load(path), lambda: Reader(path).read_metadata()):
        with pytest.raises(InputError, match=r"it names posix\.mkdir, which no checkpoint needs; nothing was run"):
            read()
    assert "posix.mkdir" in str(problem_of_shards(path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["torch.load", "torch.hub.load", "builtins.eval", "torch._C.Generator"])
def test_no_other_name_of_torch_is_allowed_either(saved, name):
    _, path = saved
    module, _, attribute = name.rpartition(".")
    (path / METADATA).write_bytes(f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(InputError, match=f"it names {name}"):
        read_metadata(path)


def test_data_that_torch_would_unpickle_is_refused(saved, tmp_path):
    # For what the list doesn't call a tensor, torch's planner unpickles whatever the shard has.
    run, path = saved
    name = "model/lm_head.weight"
    index = next(one for one in read_metadata(path).storage_data if one.fqn == name)
    info = read_metadata(path).storage_data[index]
    torch.save(Malicious(tmp_path / "ran"), path / "evil.pt")

    def change(metadata: Any) -> None:
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        info.relative_path, info.offset, info.length = "evil.pt", 0, (path / "evil.pt").stat().st_size
        metadata.storage_data = {**metadata.storage_data, type(index)(name): info}

    rewritten(path, change)
    with pytest.raises(InputError, match=r"'model/lm_head\.weight' is no tensor, and would be unpickled"):
        run.load(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", ["rank_00000.pt", "__0_0.distcp"])
def test_a_file_that_would_run_something_is_refused(saved, tmp_path, file):
    run, path = saved
    if file.startswith("rank"):
        torch.save(Malicious(tmp_path / "ran"), path / file)
    else:
        torch.save(Malicious(tmp_path / "ran"), tmp_path / "evil")
        data = (tmp_path / "evil").read_bytes()

        def change(metadata: Any) -> None:
            for info in metadata.storage_data.values():
                info.offset, info.length = 0, len(data)

        rewritten(path, change)
        (path / file).write_bytes(data)
    with pytest.raises(InputError, match="can't be loaded into this model"):
        run.load(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["relative", "absolute", "link"])
def test_shards_elsewhere_are_not_read(saved, tmp_path, kind):
    run, path = saved
    shard = path / "__0_0.distcp"
    elsewhere = shard.rename(tmp_path / "elsewhere.distcp")
    if kind == "link":
        shard.symlink_to(elsewhere)
    else:
        name = os.path.relpath(elsewhere, path) if kind == "relative" else str(elsewhere)

        def change(metadata: Any) -> None:
            for info in metadata.storage_data.values():
                info.relative_path = name

        rewritten(path, change)
    with pytest.raises(InputError, match="is not in the checkpoint: nothing outside of it is read"):
        run.load(path)


def test_a_rank_s_file_elsewhere_is_not_read(saved, tmp_path):
    run, path = saved
    (path / "rank_00000.pt").rename(tmp_path / "elsewhere")
    (path / "rank_00000.pt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"'rank_00000\.pt' is not in the checkpoint"):
        run.load(path)


def test_a_tensor_with_a_part_missing_is_refused(saved):
    # torch would leave whatever the memory held.
    run, path = saved
    name = "optimizer/lm_head.weight/exp_avg"
    rewritten(path, lambda one: one.state_dict_metadata[name].chunks.clear())
    with pytest.raises(InputError, match=r"'optimizer/lm_head\.weight/exp_avg' has 0 of 3,072 elements"):
        run.load(path)


@pytest.mark.parametrize(("key", "other"), [("exp_avg", "exp_avg_sq"), ("step", "exp_avg")])
def test_moments_that_are_partly_there_are_refused(saved, key, other):
    run, path = saved
    rewritten(path, lambda one: one.state_dict_metadata.pop(f"optimizer/lm_head.weight/{key}"))
    with pytest.raises(InputError, match=rf"lacks the optimizer state '{key}' of 'lm_head\.weight'"):
        run.load(path)


def test_a_copy_elsewhere_holds_no_path_of_where_it_was(saved, tmp_path):
    run, path = saved
    assert str(tmp_path).encode() not in b"".join(file.read_bytes() for file in path.iterdir())
    wanted = run.tensors()
    moved = path.rename(tmp_path / path.name)
    run.take_step()
    run.load(moved)
    assert same(run.tensors(), wanted)


def test_a_list_that_would_change_a_class_is_refused(saved):
    _, path = saved
    change = b"cpathlib\nPosixPath\n(N(S'name'\nS'../secret'\ndtb."
    (path / METADATA).write_bytes(b"\x80\x02" + change)
    with pytest.raises(
        InputError, match="it changes a class or a function, which no checkpoint needs; nothing was run"
    ):
        read_metadata(path)
    assert Path("a/b").name == "b"
