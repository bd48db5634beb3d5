"""The trainer of images keeps what the kit checks of trainers, and what can't be checked on images is told."""

from __future__ import annotations

import json

from hp_core.testing import trainer_checks
from hp_core.testing.checks import Check
from hp_core.testing.trainer_runs import TrainerCase
from hp_core.testing.trainers import TrainerChecks
from hp_plugins.trainers.vlm import VLMTrainer
from tests.pictures import model_config
from tests.testing.caught import failures


def recipe(num_images: int) -> str:
    content = {
        "trainer": "vlm",
        "model": {"name": "image_text", "config": model_config()},
        "dataset": {
            "_target_": "tests.testing.pictured.pictured",
            "num_images": num_images,
            "tokenizer": {"_target_": "tests.testing.pictured.small_processor"},
        },
        "optimizer": {"name": "adamw", "lr": 1e-2},
        "training": {"train_iters": 4, "global_batch_size": 4, "seed": 3},
    }
    return json.dumps(content)


MOVES = dict.fromkeys(("lengths", "documents"), "images have their places among the tokens")


@trainer_checks(VLMTrainer, recipe=recipe(2), skip=MOVES)
def test_the_trainer_of_images_keeps_every_promise(check: Check) -> None:
    check()


def test_what_moves_tokens_is_checked_on_rows_of_text_and_refused_for_others() -> None:
    text, images = (TrainerChecks(TrainerCase(VLMTrainer, {}, recipe(number))).checks() for number in (0, 2))
    assert not failures([one for one in text if one.name in MOVES])
    found = failures([one for one in images if one.name in MOVES])
    assert found.keys() == MOVES.keys()
    assert "0 of 22 rows hold several documents and no image; give 4 or more, or skip" in found["documents"]
    assert "0 of 22 rows are without images, which this check can't move" in found["lengths"]
