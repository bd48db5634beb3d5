"""Where a run writes and what it goes on from, in every case."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from hp_core.checkpoint.layout import MANIFEST, METADATA, TRAINER_STATE, step_directory
from hp_core.errors import InputError
from hp_core.observe.run_directory import (
    RunDirectory,
    choose,
    clear,
    make,
    release,
    require_apart,
    run_name,
    write_json,
)
from hp_core.observe.trackers import METRICS_FILE

NOW = datetime(2024, 5, 6, 7, 8, 9)
STAMP = "20240506-070809"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def prepare(directory: RunDirectory, *, overwrite: bool) -> None:
    make(directory)
    clear(directory, overwrite=overwrite)


def pick(
    recipe: str = "tiny.yaml", output_dir: str | None = None, resume: str | None = None, overwrite: bool = False
) -> RunDirectory:
    return choose(recipe=Path(recipe), output_dir=output_dir, resume=resume, overwrite=overwrite, now=NOW)


def a_run(path: str, *steps: int, incomplete: tuple[int, ...] = ()) -> Path:
    """A run directory with complete checkpoints and some that lack a file."""
    run = Path(path)
    run.mkdir(parents=True, exist_ok=True)
    (run / METRICS_FILE).touch()
    for step in (*steps, *incomplete):
        checkpoint = step_directory(run, step)
        checkpoint.mkdir(parents=True)
        for name in (METADATA, TRAINER_STATE, MANIFEST):
            (checkpoint / name).write_text("{}")
        if step in incomplete:
            (checkpoint / MANIFEST).unlink()
    return run


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("tiny.yaml", "tiny"),
        ("some/where/tiny.v2.yaml", "tiny.v2"),
        ("quickstart/recipe.yaml", "quickstart"),
        ("quickstart/../other/recipe.yml", "other"),
    ],
)
def test_a_run_is_called_after_its_recipe(recipe, name):
    assert run_name(Path(recipe)) == name
    assert pick(recipe) == RunDirectory(Path("runs") / f"{name}-{STAMP}", reserved=True)


def test_recipe_yaml_of_the_current_folder_is_called_after_the_folder(tmp_path):
    assert run_name(Path("recipe.yaml")) == tmp_path.name


def test_three_runs_in_one_second_have_three_directories():
    paths = []
    for _ in range(3):
        chosen = pick()
        prepare(chosen, overwrite=False)
        paths.append(chosen.path.name)
    assert paths == [f"tiny-{STAMP}", f"tiny-{STAMP}-2", f"tiny-{STAMP}-3"]


def test_only_a_directory_with_a_made_up_name_is_made_before_it_is_used(tmp_path):
    pick(output_dir="out", resume="latest")
    assert list(tmp_path.iterdir()) == []
    chosen = pick()
    assert chosen.path.is_dir()
    release(chosen)
    assert not chosen.path.exists()


def test_a_used_directory_is_not_released():
    chosen = pick()
    (chosen.path / "metrics.jsonl").touch()
    release(chosen)
    assert chosen.path.is_dir()


def test_the_recipe_s_own_folder_is_refused(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.touch()
    with pytest.raises(InputError, match="is the recipe's own folder"):
        require_apart(recipe, str(tmp_path))
    for other in (None, str(tmp_path / "run")):
        require_apart(recipe, other)


@pytest.mark.parametrize(
    ("resume", "overwrite", "hint"),
    [
        (None, False, "run it again elsewhere: --output_dir=one-2"),
        (
            "latest",
            False,
            "go on by a copy of it: cp one/recipe.yaml one.yaml && "
            "hp-train one.yaml --output_dir=one --checkpoint.resume=latest",
        ),
        (
            None,
            True,
            "replace the run by a copy of it: cp one/recipe.yaml one.yaml && "
            "hp-train one.yaml --output_dir=one --overwrite",
        ),
    ],
)
def test_what_works_with_a_run_s_own_recipe_is_told(tmp_path, monkeypatch, resume, overwrite, hint):
    monkeypatch.chdir(tmp_path)
    Path("one").mkdir()
    for name in ("recipe.yaml", "metrics.jsonl"):
        (Path("one") / name).touch()
    with pytest.raises(InputError) as raised:
        require_apart(Path("one/recipe.yaml"), "one", resume, overwrite=overwrite)
    assert raised.value.problems[0].hint == hint
    Path("one.yaml").touch()
    Path("one-2").touch()
    with pytest.raises(InputError, match=r"one-2\.yaml|one-3"):
        require_apart(Path("one/recipe.yaml"), "one", resume, overwrite=overwrite)


# A directory that is there already.


@pytest.mark.parametrize("name", ["manifest.json", "metrics.jsonl", "samples.jsonl", "checkpoints"])
def test_a_directory_that_holds_a_run_is_refused(name):
    (Path("out") / name).mkdir(parents=True)
    with pytest.raises(InputError) as caught:
        pick(output_dir="out")
    (problem,) = caught.value.problems
    assert problem.path == "output_dir"
    assert problem.message == "'out' already holds a run"
    assert "--checkpoint.resume=latest" in problem.hint
    assert "--overwrite" in problem.hint


def test_a_directory_without_a_run_is_taken():
    Path("out").mkdir()
    (Path("out") / "notes.txt").touch()
    assert pick(output_dir="out") == RunDirectory(Path("out"))


def test_a_file_is_no_directory():
    Path("out").touch()
    for overwrite in (False, True):
        with pytest.raises(InputError, match="output_dir: 'out' is a file"):
            pick(output_dir="out", overwrite=overwrite)
    with pytest.raises(InputError, match=r"output_dir: can't write to 'out/run': "):
        prepare(pick(output_dir="out/run"), overwrite=False)


def test_overwriting_clears_the_run_and_nothing_else():
    run = a_run("out", 4)
    (run / "notes.txt").write_text("keep")
    chosen = pick(output_dir="out", overwrite=True)
    assert chosen == RunDirectory(Path("out"))
    prepare(chosen, overwrite=True)
    assert [path.name for path in run.iterdir()] == ["notes.txt"]


def test_resuming_and_overwriting_exclude_each_other():
    a_run("out", 4)
    for resume in ("latest", "out"):
        with pytest.raises(InputError, match=r"checkpoint\.resume: a run that resumes appends; it can't overwrite"):
            pick(output_dir="out", resume=resume, overwrite=True)


# resume: latest


def test_latest_with_nothing_starts_at_step_0_and_says_so():
    chosen = pick(output_dir="out", resume="latest")
    assert (chosen.path, chosen.checkpoint, chosen.continues) == (Path("out"), None, False)
    assert chosen.messages == ("checkpoint.resume is latest and no complete checkpoint was found: starting at step 0",)
    assert pick(resume="latest").path == Path("runs") / f"tiny-{STAMP}"


def test_latest_goes_on_in_a_run_that_never_saved():
    a_run("out")
    chosen = pick(output_dir="out", resume="latest")
    assert (chosen.path, chosen.checkpoint, chosen.continues) == (Path("out"), None, True)


def test_latest_takes_the_newest_by_number():
    run = a_run("out", 9, 10, 2)
    # Numbers that have outgrown their padding are newer, not older, than text order says.
    big = a_run("big", 99999999, 100000000)
    for path, step in ((run, 10), (big, 100000000)):
        chosen = pick(output_dir=str(path), resume="latest")
        assert chosen.checkpoint is not None
        assert (chosen.path, chosen.checkpoint.step, chosen.continues) == (path, step, True)
        assert chosen.messages == (f"resuming from {step_directory(path, step)} (step {step})",)


@pytest.mark.parametrize("missing", [METADATA, TRAINER_STATE, MANIFEST])
def test_latest_passes_over_what_is_incomplete_and_says_so(missing):
    run = a_run("out", 2, 4, 6)
    (step_directory(run, 6) / missing).unlink()
    whole_but_unnamed = step_directory(run, 8).with_name("step_00000008.tmp")
    step_directory(run, 4).rename(whole_but_unnamed)
    chosen = pick(output_dir="out", resume="latest")
    assert chosen.checkpoint is not None
    assert chosen.checkpoint.step == 2
    assert chosen.messages == (
        f"passed over {whole_but_unnamed}: incomplete",
        f"passed over {step_directory(run, 6)}: incomplete: {missing} is missing",
        f"resuming from {step_directory(run, 2)} (step 2)",
    )


def test_latest_with_only_incomplete_ones_starts_anew_and_says_so():
    run = a_run("out", incomplete=(3,))
    chosen = pick(output_dir="out", resume="latest")
    assert (chosen.checkpoint, chosen.continues) == (None, True)
    assert chosen.messages[0] == f"passed over {step_directory(run, 3)}: incomplete: {MANIFEST} is missing"
    assert chosen.messages[1].endswith("starting at step 0")


def test_latest_without_a_directory_takes_the_newest_run_of_this_recipe():
    a_run("runs/tiny-20240101-000000", 5)
    newest = a_run("runs/tiny-20240102-000000-10", 3)
    a_run("runs/tiny-20240102-000000-2", 4)
    never_saved = a_run("runs/tiny-20240103-000000", incomplete=(1,))
    # Runs of recipes whose names only begin alike, and what no run made.
    a_run("runs/tiny-moe-20240104-000000", 9)
    a_run("runs/tiny-", 9)
    a_run("runs/tinyx20240104-000000", 9)
    Path("runs/tiny-20240105-000000").mkdir()
    chosen = pick(resume="latest")
    assert (chosen.path, chosen.continues) == (newest, True)
    assert chosen.messages == (
        f"passed over {step_directory(never_saved, 1)}: incomplete: {MANIFEST} is missing",
        f"resuming from {step_directory(newest, 3)} (step 3)",
    )


# resume: PATH


def test_a_run_s_path_means_its_newest_checkpoint():
    run = a_run("out", 2, 10, incomplete=(12,))
    chosen = pick(resume="out")
    assert chosen.checkpoint is not None
    assert (chosen.path, chosen.checkpoint.step, chosen.continues) == (run, 10, True)
    assert chosen.messages[0] == f"passed over {step_directory(run, 12)}: incomplete: {MANIFEST} is missing"


def test_a_checkpoint_s_path_means_that_checkpoint():
    run = a_run("out", 2, 10)
    chosen = pick(resume=str(step_directory(run, 2)))
    assert chosen.checkpoint is not None
    assert (chosen.path, chosen.checkpoint.step, chosen.continues) == (run, 2, True)


def test_a_checkpoint_may_be_named_from_within_its_run(monkeypatch, tmp_path):
    run = a_run("out", 2)
    monkeypatch.chdir(run / "checkpoints")
    chosen = pick(resume="step_00000002")
    assert (chosen.path.resolve(), chosen.continues) == (tmp_path / run, True)


def test_a_checkpoint_copied_out_of_its_run_starts_a_run_of_its_own():
    step_directory(a_run("out", 2), 2).rename("step_00000002")
    chosen = pick(resume="step_00000002")
    assert chosen.checkpoint is not None
    assert (chosen.path, chosen.checkpoint.step, chosen.continues) == (Path("runs") / f"tiny-{STAMP}", 2, False)


def test_resuming_into_another_directory_does_not_continue_the_first():
    run = a_run("out", 2)
    chosen = pick(resume="out", output_dir="new")
    assert (chosen.path, chosen.continues) == (Path("new"), False)
    assert pick(resume="out", output_dir="./new/../out").continues
    a_run("new")
    with pytest.raises(InputError, match="'new' already holds a run"):
        pick(resume=str(run), output_dir="new")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nowhere", "no such directory"),
        ("notes.txt", "no such directory"),
        ("empty", "no complete checkpoint in it"),
        (
            "out",
            "no complete checkpoint in it; "
            "passed over out/checkpoints/step_00000003: incomplete: manifest.json is missing",
        ),
        ("out/checkpoints/step_00000003", "incomplete: manifest.json is missing"),
        ("out/checkpoints/step_00000004", "no such directory"),
    ],
)
def test_a_path_without_a_complete_checkpoint_is_an_error(path, reason):
    Path("notes.txt").touch()
    Path("empty").mkdir()
    a_run("out", incomplete=(3,))
    with pytest.raises(InputError) as caught:
        pick(resume=path)
    (problem,) = caught.value.problems
    assert problem.path == "checkpoint.resume"
    assert problem.message == f"can't resume from {path!r}: {reason}"
    assert "step_" in problem.hint or problem.hint.endswith("newest intact one: out")


def test_json_files_are_replaced_in_one_move(tmp_path):
    path = tmp_path / "manifest.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 2}
