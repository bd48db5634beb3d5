"""What the `checkpoint` section refuses: values that would keep less than they say, or judge by what isn't known."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_core.config import load_recipe
from hp_core.errors import InputError
from tests.e2e.runs import recipe

BEST = "--checkpoint.keep_best={metric: eval_loss}"
LAST = "--checkpoint.keep_last=1"


def problems(path: Path, *overrides: str) -> list[str]:
    try:
        load_recipe(str(path), list(overrides))
    except InputError as error:
        return [f"{one.path}: {one.message}; {one.hint}" for one in error.problems]
    return []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["--checkpoint.keep_every=4", "--checkpoint.save_every=2"],
            "checkpoint.keep_every: has no effect without keep_last, for everything is kept; "
            "write keep_last: 1, or remove 'keep_every'",
        ),
        (
            [LAST, "--checkpoint.keep_every=6", "--checkpoint.save_every=4"],
            "checkpoint.keep_every: 6 is no step that is saved: every 4 steps are saved; "
            "write a multiple of save_every",
        ),
        (
            [LAST, "--checkpoint.keep_every=6"],
            "checkpoint.keep_every: 6 is no step that is saved: none is saved on the way; "
            "write a multiple of save_every",
        ),
        (
            [LAST, "--checkpoint.keep_best={count: 2}"],
            "checkpoint.keep_best.count: 2 has no effect without a metric; write metric: eval_loss, or remove 'count'",
        ),
        (
            [LAST, BEST, "--checkpoint.save_every=4", "--evaluation.every=3"],
            "checkpoint.keep_best.metric: evaluation.every is 3, so 'eval_loss' isn't known at every step that is "
            "saved (save_every 4); write evaluation.every: 4",
        ),
        (
            [LAST, BEST, "--checkpoint.save_every=4"],
            "checkpoint.keep_best.metric: evaluation.every is 0, so 'eval_loss' isn't known at every step that is "
            "saved (save_every 4); write evaluation.every: 4",
        ),
        (
            [LAST, "--checkpoint.keep_best={metric: loss}", "--checkpoint.save_every=4", "--training.log_every=8"],
            "checkpoint.keep_best.metric: training.log_every is 8, so 'loss' isn't known at every step that is saved "
            "(save_every 4); write training.log_every: 4",
        ),
    ],
)
def test_values_that_have_no_effect_are_refused(tmp_path, overrides, expected):
    assert problems(recipe(tmp_path), *overrides) == [expected]


@pytest.mark.parametrize(
    "overrides",
    [
        [LAST, BEST, "--checkpoint.save_every=4", "--evaluation.every=2"],
        [LAST, "--checkpoint.keep_best={metric: loss, mode: max, count: 3}", "--checkpoint.save_every=4"],
        [LAST, "--checkpoint.keep_every=8", "--checkpoint.save_every=4"],
        ["--checkpoint.async=true"],
    ],
)
def test_values_that_go_together_are_taken(tmp_path, overrides):
    assert problems(recipe(tmp_path), *overrides) == []


def test_the_key_is_async(tmp_path):
    path = recipe(tmp_path)
    assert load_recipe(str(path), ["--checkpoint.async=true"]).config.checkpoint.async_save
    assert not load_recipe(str(path), []).config.checkpoint.async_save
    with pytest.raises(InputError, match="unknown key; did you mean 'async'"):
        load_recipe(str(path), ["--checkpoint.async_save=true"])
