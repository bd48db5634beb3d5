"""What a section on the profiler can't mean is told at its place, all at once."""

from pathlib import Path

import pytest

from hp_core import InputError, load_recipe
from hp_core.testing import TINY_RECIPE


@pytest.mark.parametrize(
    ("section", "problems"),
    [
        ("{start_step: 5, stop_step: 4}", {"stop_step": "step 4 comes before start_step 5"}),
        ("{start_step: 1, ranks: [0, 2, 0]}", {"ranks": "names rank 0 more than once"}),
        (
            "{stop_step: 1, with_stack: true, ranks: [1]}",
            dict.fromkeys(("stop_step", "ranks", "with_stack"), "has no effect without start_step"),
        ),
    ],
)
def test_conflicts(tmp_path: Path, section: str, problems: dict[str, str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(TINY_RECIPE)
    with pytest.raises(InputError) as caught:
        load_recipe(recipe, [f"--profiler={section}", "--training.train_iters=9"])
    found = {one.path.removeprefix("profiler."): one.message for one in caught.value.problems}
    assert found == problems
