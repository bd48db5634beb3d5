"""What an export goes by: the recipe and assets of the part of the run in which its checkpoint was made."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hp_core.export.settings as settings
from hp_core.export.settings import settings_of_step, write_settings
from tests.e2e.runs import hp_train_here

FILES = {name: {"config.json": name.encode(), f"only_{name}": b""} for name in "abc"}


@given(st.lists(st.tuples(st.integers(1, 6), st.sampled_from("abc"), st.integers(0, 5)), min_size=1, max_size=6))
def test_each_step_has_what_it_was_made_with(parts: list[tuple[int, str, int]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        made: dict[int, str] = {}
        for length, by, back in parts:
            # Back to a step that there is, or anew.
            step = max(0, max(made, default=0) - back)
            made = {one: its for one, its in made.items() if one <= step}
            write_settings(directory, by, FILES[by], step or None)
            made |= dict.fromkeys(range(step + 1, step + length + 1), by)
            for one, its in made.items():
                folder = settings_of_step(directory, one)
                assert (folder / "recipe.yaml").read_text() == its
                held = {path.name: path.read_bytes() for path in (folder / "assets").iterdir()}
                assert held == FILES[its]


def test_whatever_is_cut_off_can_be_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = settings._write

    def broken(folder: Path, files: Mapping[str, bytes]) -> None:
        nonlocal calls
        calls += 1
        write(folder, dict(list(files.items())[: 1 if calls == last else None]))
        if calls == last:
            raise OSError("the disk is gone")

    for last in (1, 2):
        directory = tmp_path / str(last)
        write_settings(directory, "a", FILES["a"], None)
        calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(settings, "_write", broken)
            with pytest.raises(OSError, match="the disk is gone"):
                write_settings(directory, "b", FILES["b"], 3)
        write_settings(directory, "b", FILES["b"], 3)
        for step, name in ((3, "a"), (4, "b")):
            folder = settings_of_step(directory, step)
            assert {path.name: path.read_bytes() for path in (folder / "assets").iterdir()} == FILES[name]


def a_recipe(folder: Path, heads: int) -> str:
    """Four steps of a model that has the same weights with other numbers of heads."""
    (folder / "texts.txt").write_text("A line of text, and more of it.\n" * 40)
    path = folder / "r.yaml"
    path.write_text(
        "model: {name: causal_lm, config: {model_type: llama, vocab_size: 257, hidden_size: 16, "
        f"intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: {heads}}}}}\n"
        f"dataset: {{name: text, files: '{folder}/texts.txt', max_seq_len: 32, tokenizer: {{name: bytes}}}}\n"
        "optimizer: {name: sgd, lr: 0.1}\n"
        "training: {train_iters: 4, global_batch_size: 2}\n"
        f"checkpoint: {{save_every: 2, keep_last: null}}\noutput_dir: {folder}/run\n"
    )
    return str(path)


def test_an_earlier_step_is_exported_with_its_own_configuration(tmp_path: Path) -> None:
    done = hp_train_here(a_recipe(tmp_path, 4), "--training.stop_after=2")
    assert done.returncode == 0, done.stderr
    done = hp_train_here(a_recipe(tmp_path, 2), "--checkpoint.resume=latest")
    assert done.returncode == 0, done.stderr
    assert "num_attention_heads 4 -> 2" in done.stderr + done.stdout
    for step, heads in ((2, 4), (4, 2)):
        out = tmp_path / f"out{step}"
        done = hp_train_here("export", str(tmp_path / "run"), "--step", str(step), "--to", str(out))
        assert done.returncode == 0, done.stderr
        assert json.loads((out / "config.json").read_text())["num_attention_heads"] == heads


def test_a_recipe_that_ends_before_the_checkpoint_is_told(tmp_path: Path) -> None:
    path = a_recipe(tmp_path, 2)
    assert hp_train_here(path).returncode == 0
    done = hp_train_here(path, "--checkpoint.resume=latest", "--training.train_iters=2")
    assert done.returncode == 0, done.stderr
    assert "training.train_iters is 2, and the run has taken 4 steps: none follows" in done.stderr + done.stdout
