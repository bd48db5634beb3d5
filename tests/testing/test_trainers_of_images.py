"""The trainer of images keeps what the kit checks of trainers, and what can't be checked on images is told."""

from __future__ import annotations

import json
import re

from hp_core.testing import trainer_checks
from hp_core.testing.checks import Check
from hp_core.testing.trainer_runs import TrainerCase
from hp_core.testing.trainers import TrainerChecks
from hp_plugins.trainers.vlm import VLMTrainer
from tests.pictures import model_config
from tests.testing.caught import failures


def recipe(fewest: int) -> str:
    content = {
        "trainer": "vlm",
        "model": {"name": "image_text", "config": model_config()},
        "dataset": {
            "_target_": "tests.testing.pictured.pictured",
            "fewest": fewest,
            "tokenizer": {"_target_": "tests.testing.pictured.small_processor"},
        },
        "optimizer": {"name": "adamw", "lr": 1e-2},
        "training": {"train_iters": 4, "global_batch_size": 4, "seed": 3},
    }
    return json.dumps(content)


@trainer_checks(VLMTrainer, recipe=recipe(0))
def test_the_trainer_of_images_keeps_every_promise(check: Check) -> None:
    check()


def test_what_moves_tokens_is_refused_where_all_rows_have_images() -> None:
    checks = TrainerChecks(TrainerCase(VLMTrainer, {}, recipe(1))).checks()
    found = failures([one for one in checks if one.name in ("lengths", "documents")])
    assert re.search(r"0 of \d+ rows hold several documents and no image; give 4 or more, or skip", found["documents"])
    assert re.search(r"0 of \d+ rows are without images, which this check can't move", found["lengths"])
