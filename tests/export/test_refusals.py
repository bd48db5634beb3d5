"""What can't be exported is told before the first step; what a directory must not lose is not overwritten."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM

import hp_core.export.export as exporting
from hp_core.errors import InputError, RunError
from hp_core.export.assets import Assets
from hp_core.export.check import checked_export
from hp_core.export.export import export_checkpoint
from hp_core.export.settings import write_settings
from hp_core.export.writing import as_bytes
from hp_core.training.beginning import Beginning
from tests.e2e.runs import hp_train, hp_train_here, manifest, recipe
from tests.model.tiny import LLAMA, LLAMA_TIED, a_setup, build

BUILDERS = """\
import torch
from torch import nn
from hp_core.testing.models import tiny_model


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = tiny_model("llama")

    def forward(self, input_ids=None, **inputs):
        return self.inner(input_ids=input_ids, **inputs)


def plain(*, distributed_setup):
    return Plain()


class NoFiles:
    name, vocab_size, eos_id, fingerprint = "nofiles", 96, 0, "1"

    def encode_batch(self, texts):
        return [[1] for _ in texts]

    def decode(self, ids):
        return ""

    def save(self, directory):
        pass


def no_files():
    return NoFiles()


class Broken(NoFiles):
    name = "broken"

    def save(self, directory):
        raise RuntimeError("the vocabulary is gone")


def broken():
    return Broken()
"""


class Subclass(LlamaForCausalLM):
    """Of the user's own."""


def check(setup: Any, model: nn.Module, tokenizer: Any = None) -> Any:
    return checked_export(model, tokenizer, setup)


def test_a_model_whose_class_is_not_in_transformers_trains_and_the_run_says_why(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "builders_of_users.py").write_text(BUILDERS)
    path = tmp_path / "r.yaml"
    text = recipe(tmp_path).read_text()
    path.write_text("model: {_target_: builders_of_users.plain}\n" + text[text.index("dataset:") :])
    done = hp_train_here(str(path), "--training.train_iters=1")
    assert done.returncode == 0, done.stderr
    why = "builders_of_users.Plain is no model of transformers"
    assert f"the trained model can't be exported: {why}" in done.stdout
    assert manifest(tmp_path / "run")["export"] == {"possible": False, "why": why}
    done = hp_train_here("export", str(tmp_path / "run"), "--to", str(tmp_path / "out"))
    assert done.returncode == 2
    assert why in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_subclass_of_the_user_s_is_not_plain_transformers(tmp_path):
    with a_setup() as setup:
        assert "Subclass" in check(setup, Subclass(build(setup, LLAMA).config)).why_not


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ("no_files", "the tokenizer nofiles saved no file"),
        ("broken", "can't save the tokenizer broken: RuntimeError: the vocabulary is gone"),
    ],
)
def test_a_tokenizer_that_can_t_be_saved_ends_the_run_before_its_first_step(tokenizer, message, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "builders_of_users.py").write_text(BUILDERS)
    path = recipe(tmp_path)
    target = f"dataset:\n  tokenizer: {{_target_: builders_of_users.{tokenizer}}}\n"
    path.write_text(path.read_text().replace("dataset:\n", target))
    done = hp_train_here(str(path))
    assert done.returncode == 2
    assert message in done.stderr
    assert f"{path}:14:" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["check", "train"])
def test_sampling_values_without_sampling_end_the_run_before_its_first_step(command, tmp_path):
    path = recipe(tmp_path)
    text = path.read_text().replace(
        "  name: causal_lm\n", "  name: causal_lm\n  generation_config: {temperature: 0.6}\n"
    )
    path.write_text(text)
    done = hp_train_here(command, str(path))
    assert done.returncode == 2
    assert "`temperature` is set to `0.6`" in done.stderr
    assert "write do_sample: true in model.generation_config" in done.stderr
    assert not (tmp_path / "run").exists()
    fixed = hp_train_here(command, str(path), "--model.generation_config.do_sample=true", "--training.train_iters=1")
    assert fixed.returncode == 0, fixed.stderr


def test_a_generation_config_of_the_source_is_handed_on_with_what_the_recipe_changes(tmp_path):
    with a_setup() as setup:
        build(setup, LLAMA).save_pretrained(tmp_path / "hf", safe_serialization=True)
    GenerationConfig(eos_token_id=[2, 5], do_sample=True, temperature=0.6).save_pretrained(tmp_path / "hf")
    path = recipe(tmp_path)
    text = path.read_text()
    source = f"model:\n  name: causal_lm\n  pretrained: {tmp_path / 'hf'}\n  generation_config: {{top_k: 7}}\n"
    path.write_text(source + text[text.index("dataset:") :])
    assert hp_train_here(str(path), "--training.train_iters=1").returncode == 0
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (found["eos_token_id"], found["temperature"], found["top_k"]) == ([2, 5], 0.6, 7)


def test_ties_that_the_configuration_does_not_tell_are_refused_both_ways():
    with a_setup() as setup:
        model = build(setup, LLAMA)
        model.lm_head.weight = model.model.embed_tokens.weight
        with pytest.raises(InputError, match=r"are one tensor, which the configuration doesn't say"):
            check(setup, model)
        tied = build(setup, LLAMA_TIED)
        tied.lm_head.weight = nn.Parameter(tied.lm_head.weight.detach().clone())
        with pytest.raises(InputError, match=r"ties 'lm_head.weight' to 'model.embed_tokens.weight', and each is"):
            check(setup, tied)


def test_a_model_that_its_configuration_does_not_describe_is_refused():
    with a_setup() as setup:
        model = build(setup, LLAMA)
        model.value_head = nn.Linear(32, 1)
        with pytest.raises(InputError, match=r"'value_head.bias', 'value_head.weight': the trained model has it"):
            check(setup, model)
        model = build(setup, LLAMA)
        model.config.vocab_size += 1
        with pytest.raises(InputError, match=r"'lm_head.weight', 'model.embed_tokens.weight': its shape"):
            check(setup, model)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with checkpoints after steps 2 and 4."""
    folder = tmp_path_factory.mktemp("run")
    done = hp_train_here(str(recipe(folder)), "--training.train_iters=4", "--checkpoint.save_every=2")
    assert done.returncode == 0, done.stderr
    return folder / "run"


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto").state_dict()


def test_the_step_is_the_newest_or_the_one_that_is_named(run, tmp_path):
    assert export_checkpoint(run, tmp_path / "newest").checkpoint.step == 4
    second = export_checkpoint(run, tmp_path / "second", step=2)
    assert second.checkpoint.step == 2
    assert "no tokenizer" in second.remarks[0]
    same = export_checkpoint(run / "checkpoints" / "step_00000002", tmp_path / "same")
    assert same.num_bytes == second.num_bytes
    newest, named, again = (weights(tmp_path / name) for name in ("newest", "second", "same"))
    assert all(torch.equal(named[name], again[name]) for name in named)
    assert not torch.equal(named["lm_head.weight"], newest["lm_head.weight"])
    with pytest.raises(InputError, match=r"--step 3: no complete checkpoint of that step.*there are steps 2, 4"):
        export_checkpoint(run, tmp_path / "third", step=3)
    assert not (tmp_path / "third").exists()


def test_files_are_no_larger_than_asked_and_their_index_leads_to_every_tensor(run, tmp_path):
    whole = export_checkpoint(run, tmp_path / "whole")
    parts = export_checkpoint(run, tmp_path / "parts", max_shard_bytes=20_000)
    files = sorted((tmp_path / "parts").glob("*.safetensors"))
    assert (whole.num_files, parts.num_files) == (1, len(files))
    assert len(files) > 3
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == whole.num_bytes == parts.num_bytes
    assert set(index["weight_map"].values()) == {path.name for path in files}
    assert all(path.stat().st_size < 22_000 for path in files)
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in files)
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_in_the_dtype_that_is_asked_for(dtype, run, tmp_path):
    export_checkpoint(run, tmp_path / "whole")
    export_checkpoint(run, tmp_path / "half", dtype=dtype)
    found, wanted = weights(tmp_path / "half"), weights(tmp_path / "whole")
    assert {one.dtype for one in found.values()} == {getattr(torch, dtype)}
    assert all(torch.equal(found[name], wanted[name].to(getattr(torch, dtype))) for name in wanted)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == dtype


def test_a_directory_in_use_is_left_alone(run, tmp_path):
    other = tmp_path / "notes"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match=r"is not empty; give --overwrite"):
        export_checkpoint(run, other)
    with pytest.raises(InputError, match=r"this directory is none: it has no hp_export\.json"):
        export_checkpoint(run, other, overwrite=True)
    for place in (run, run.parent, run / "checkpoints"):
        with pytest.raises(InputError, match="holds the run itself"):
            export_checkpoint(run, place, overwrite=True)
    assert (other / "mine.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    export_checkpoint(run, tmp_path / "empty", step=2)
    (tmp_path / "empty" / "stale.bin").touch()
    export_checkpoint(run, tmp_path / "empty", overwrite=True)
    assert not (tmp_path / "empty" / "stale.bin").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "notes"]


def test_a_model_of_the_user_s_is_no_export(run, tmp_path):
    export_checkpoint(run, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "hp_export.json").read_text()).keys() == {"step", "dtype"}
    AutoModelForCausalLM.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "mine")
    before = {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()}
    assert {"config.json", "model.safetensors"} <= before.keys()
    with pytest.raises(InputError, match=r"this directory is none: it has no hp_export\.json; name another directory"):
        export_checkpoint(run, tmp_path / "mine", overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()} == before


def test_an_export_that_fails_leaves_the_earlier_one(run, tmp_path, monkeypatch):
    export_checkpoint(run, tmp_path / "out", step=2)
    before = weights(tmp_path / "out")

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hp_core.export.writing.save_file", full)
    with pytest.raises(RunError, match=r"can't write .*out: No space left on device$"):
        export_checkpoint(run, tmp_path / "out", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    monkeypatch.undo()
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(exporting.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(RunError, match=r"it takes .* [KM]iB, and .* are free"):
        export_checkpoint(run, tmp_path / "out", overwrite=True)
    assert all(torch.equal(before[name], value) for name, value in weights(tmp_path / "out").items())


@pytest.mark.parametrize("damage", ["cut", "gone", "zeroed", "metadata"])
def test_a_broken_checkpoint_is_refused(damage, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000004"
    shard = next(checkpoint.glob("*.distcp"))
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:5000])
    elif damage == "gone":
        shard.unlink()
    elif damage == "zeroed":
        content = shard.read_bytes()
        shard.write_bytes(content[:8000] + bytes(len(content) - 8000))
    else:
        # What would run if it were unpickled.
        (checkpoint / "files.json").unlink()
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        state.pop("format")
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
        (checkpoint / ".metadata").write_bytes(f"cos\nsystem\n(S'touch {tmp_path}/ran'\ntR.".encode())
    with pytest.raises(InputError, match="step_00000004"):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "ran").exists()


def test_overwrite_replaces_a_whole_export_as_its_help_says(run, tmp_path):
    export_checkpoint(run, tmp_path / "out")
    (tmp_path / "out" / "card.md").write_text("mine")
    export_checkpoint(run, tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "card.md").exists()
    told = " ".join(hp_train("export", "--help").stdout.split())
    assert "all that is in its directory goes, also files that you have put there" in told


@pytest.mark.parametrize("names", [(".metadata",), ("files.json",), (".metadata", "manifest.json")])
@pytest.mark.parametrize("how", ["checkpoint", "step", "run"])
def test_what_a_checkpoint_lacks_is_told_however_it_is_named(names, how, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    for number in (2, 4):
        for name in names:
            (tmp_path / "run" / "checkpoints" / f"step_0000000{number}" / name).unlink()
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000004"
    lacks = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} missing"
    with pytest.raises(InputError) as raised:
        export_checkpoint(
            checkpoint if how == "checkpoint" else tmp_path / "run", tmp_path / "out", step=4 if how == "step" else None
        )
    assert f"{checkpoint}: incomplete: {lacks}" in str(raised.value)
    with pytest.raises(InputError, match=f"step_00000004'?: incomplete: {re.escape(lacks)}"):
        resumed_from(checkpoint)
    assert not (tmp_path / "out").exists()


def resumed_from(path: Path) -> None:
    """As far as a run looks at a checkpoint that its recipe names."""
    with a_setup() as setup:
        beginning = Beginning(Path("tiny.yaml"), None, str(path), False, None)
        beginning.directory(setup)


def test_a_checkpoint_without_its_run_is_told_what_it_lacks(run, tmp_path):
    shutil.copytree(run / "checkpoints" / "step_00000004", tmp_path / "step_00000004")
    with pytest.raises(InputError, match="export from the run's own directory"):
        export_checkpoint(tmp_path / "step_00000004", tmp_path / "out")
    with pytest.raises(InputError, match="no such directory"):
        export_checkpoint(tmp_path / "nothing", tmp_path / "out")


def test_sizes_are_read_as_people_write_them():
    assert [as_bytes(text) for text in ("5GB", "500 MB", "1.5gb", "2GiB", "77")] == [5e9, 5e8, 1.5e9, 2**31, 77]
    for text in ("", "GB", "-1GB", "0", "5 PB"):
        with pytest.raises(InputError, match="is no size"):
            as_bytes(text)


def test_a_user_s_directories_beside_an_export_are_left_alone(run, tmp_path):
    for name in ("out.old", "out.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").touch()
    export_checkpoint(run, tmp_path / "out")
    export_checkpoint(run, tmp_path / "out", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.old", "out.tmp"]
    assert all((tmp_path / name / "mine").exists() for name in ("out.old", "out.tmp"))
    with pytest.raises(InputError, match="holds the run itself"):
        export_checkpoint(run, run / "assets", overwrite=True)


def test_an_export_that_can_t_take_its_place_gives_the_earlier_one_back(run, tmp_path, monkeypatch):
    export_checkpoint(run, tmp_path / "out")
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(RunError, match="Input/output error"):
        export_checkpoint(run, tmp_path / "out", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "config.json").exists()


def test_another_configuration_is_told_before_it_takes_the_place_of_the_run_s(tmp_path: Path) -> None:
    def assets(**config: Any) -> Assets:
        return Assets(files={"config.json": json.dumps(config).encode()})

    first = assets(n_head=2, transformers_version="5.0")
    assert first.changes(tmp_path) == []
    write_settings(tmp_path, "", first.files, None)
    assert assets(n_head=2, transformers_version="5.1").changes(tmp_path) == []
    (line,) = assets(n_head=4, activation="relu").changes(tmp_path)
    assert "has changed: activation None -> relu, n_head 2 -> 4;" in line
