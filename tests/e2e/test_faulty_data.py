"""Faulty rows in whole runs: told with their place, or left out up to a limit and counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import hp_train_here, manifest, recipe

LINES = [
    '{"text": "the first text of some"}',
    '{"text": "broken"',
    '{"text": "the second text of some"}',
    '{"texts": "misnamed"}',
    '{"text": null}',
    '{"text": "half \\ud800 a pair"}',
    '{"text": "the third text of some"}',
]
FAULTS = [
    ":2: not valid JSON: Expecting ',' delimiter (column 18)",
    ":4: the row has no field 'text'; its fields are: texts; did you mean 'texts'?",
    ":5: field 'text' is null",
    ":6: text: character 6 is '\\ud800', half of a surrogate pair",
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text("\n".join(LINES))
    path = recipe(tmp_path)
    text = path.read_text().replace("vocab_size: 96", "vocab_size: 300").replace("train_iters: 6", "train_iters: 1")
    own = f"  name: text\n  tokenizer: bytes\n  max_seq_len: 16\n  files: {tmp_path}/a.jsonl\n"
    path.write_text(text.replace("  _target_: tests.e2e.parts.numbered_rows\n", own))
    return path


def test_faulty_rows_end_the_run_and_are_told_together(path: Path, tmp_path: Path) -> None:
    done = hp_train_here(str(path))
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "a.jsonl" in line] == [
        f"{tmp_path}/a.jsonl{fault}" for fault in FAULTS
    ]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_faulty_rows_left_out_are_counted(path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(2):
        # The second run finds the tokens in the cache, and says the same.
        out = tmp_path / f"run{number}"
        done = hp_train_here(str(path), "--dataset.on_error=skip", f"--output_dir={out}")
        assert done.returncode == 0, done.stderr
        assert "3 documents; left out: 4 faulty rows" in done.stdout
        assert manifest(out)["data"]["train"]["faulty_rows"] == 4
    assert all(fault in caplog.text for fault in FAULTS)


def test_more_faults_than_the_limit_end_the_run(path: Path, tmp_path: Path) -> None:
    for _ in range(2):
        done = hp_train_here(str(path), "--dataset.on_error=skip", "--dataset.max_errors=3")
        assert done.returncode == 2
        assert "more faulty rows than the 3 of max_errors; the first:" in done.stderr
        assert FAULTS[0] in done.stderr
    assert hp_train_here(str(path), "--dataset.on_error=skip", "--dataset.max_errors=4").returncode == 0


def test_empty_files_are_faults_and_empty_data_is_always_an_error(path: Path, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text("\n")
    files = f"--dataset.files=[{tmp_path}/a.jsonl, {tmp_path}/b.jsonl]"
    done = hp_train_here(str(path), files, "--dataset.on_error=skip")
    assert done.returncode == 0, done.stderr
    assert "left out: 5 faulty rows" in done.stdout
    for more in ((), ("--dataset.on_error=skip",)):
        done = hp_train_here(str(path), f"--dataset.files={tmp_path}/b.jsonl", f"--output_dir={tmp_path}/other", *more)
        assert done.returncode == 2
    assert "has nothing to predict" in done.stderr
    assert "1 faulty rows" in done.stderr


def test_a_column_of_the_wrong_type_is_a_fault_of_its_row(path: Path, tmp_path: Path) -> None:
    start = '{"text": "some text that is long enough", "score": '
    rows = [f"{start}{value}}}" for value in ("1.5", "NaN", '"two"', "[1]")]
    (tmp_path / "c.jsonl").write_text("\n".join(rows))
    loss = "--loss_fn={name: causal_lm, token_weights: score}"
    given = (f"--dataset.files={tmp_path}/c.jsonl", "--dataset.columns=[score]", loss, "--training.global_batch_size=1")
    done = hp_train_here(str(path), *given)
    assert done.returncode == 2
    for line, reason in ((2, "is nan"), (3, "is the text 'two'"), (4, "is a list")):
        assert f"c.jsonl:{line}: column 'score' {reason}" in done.stderr
    done = hp_train_here(str(path), *given, "--dataset.on_error=skip")
    assert "left out: 3 faulty rows" in done.stdout, done.stderr
