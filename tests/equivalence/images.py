"""Steps of tiny models of images and text, with images on some rows only, on any layout of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hp_core.data.images.positions import axis_positions
from hp_core.model.tiny import tiny_skeleton
from hp_core.parallel.context.sequence import own_part
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.images import AXIS_POSITIONS, BLANK_IMAGE, UNCUT, with_axis_positions
from hp_core.testing.ranks import run_ranks
from hp_core.training.accounting import MicroBatch
from hp_core.training.loss import IGNORE_INDEX
from tests.equivalence.layouts import NUM_ROWS, WITH_FAMILIES, Case, Found, Layout, Trial, _merged, _setup

START, IMAGE, END = 92, 90, 93
# Patches of an image in time, height and width; four are a token.
GRIDS = ((1, 4, 4), (1, 2, 4), (1, 6, 2), (1, 2, 2))
FEATURES = 3 * 2 * 4 * 4


@dataclass(frozen=True)
class ImageCase(Case):
    """Rows of packed documents; `images` says which grids each row has: one in its first document, one in its last.

    Micro-batches without images are given a blank one unless `blank` is false.
    """

    images: tuple[tuple[int, ...], ...] = ((0, 1), (), (2,), ())
    blank: bool = True

    def micro_batch(self, rows: Sequence[int], step: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
        """The rows as the model's and the loss's inputs."""
        batch = {name: value[list(rows)] for name, value in self.batch(step).items()}
        grids: list[tuple[int, int, int]] = []
        axes = []
        for place, row in enumerate(rows):
            own = [GRIDS[number] for number in self.images[row]]
            ids, labels = batch["input_ids"][place], batch["labels"][place]
            self._write(ids, labels, batch["position_ids"][place], own)
            merged = np.array(own, dtype=np.int64).reshape(-1, 3) // (1, 2, 2)
            axes.append(axis_positions(batch["position_ids"][place].numpy(), (ids == IMAGE).numpy(), merged))
            grids += own
        pixels = self._pixels(grids or [GRIDS[3]])
        labels = batch["labels"]
        inputs = {
            "input_ids": batch["input_ids"],
            "position_ids": batch["position_ids"],
            AXIS_POSITIONS: torch.from_numpy(np.stack(axes)),
            "labels": labels,
            "shift_labels": labels,
            "use_cache": False,
            **(pixels if grids else {BLANK_IMAGE: pixels} if self.blank else {}),
        }
        return inputs, {"labels": labels, "sample_ids": batch["sample_ids"]}

    def _pixels(self, grids: Sequence[tuple[int, int, int]]) -> dict[str, torch.Tensor]:
        values = []
        for grid in grids:
            own = torch.Generator().manual_seed(sum(size * 10**place for place, size in enumerate(grid)))
            values.append(torch.randn(grid[0] * grid[1] * grid[2], FEATURES, generator=own))
        return {"pixel_values": torch.cat(values), "image_grid_thw": torch.tensor(grids)}

    def _write(
        self, ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor, grids: Sequence[tuple[int, int, int]]
    ) -> None:
        """Put each image behind the first token of its document."""
        begins = torch.where(positions == 0)[0].tolist()
        places = [begins[0], begins[-1]]
        for place, grid in zip(places, grids, strict=False):
            size = grid[0] * grid[1] * grid[2] // 4
            block = torch.tensor([START, *[IMAGE] * size, END])
            ids[place : place + len(block)] = block
            labels[place : place + size + 1] = IGNORE_INDEX


class ImageTrial(Trial):
    """An `ImageCase` on these ranks."""

    def _micro_batches(self, step: int) -> list[MicroBatch]:
        case, number = self.case, self.layout.num_micro_batches
        assert isinstance(case, ImageCase)
        size = NUM_ROWS // (self.setup.dp_size * number)
        found = []
        for index in range(self.setup.dp_rank * number, (self.setup.dp_rank + 1) * number):
            inputs = case.micro_batch(range(index * size, (index + 1) * size), step)
            if self.setup.sizes.cp > 1:
                inputs = own_part(*inputs, self.setup, whole=UNCUT)
            found.append(MicroBatch.of(with_axis_positions(inputs[0]), inputs[1], self.contract))
        return found


def images_on(case: ImageCase, layout: Layout) -> Found:
    """The case's first step."""
    return Found(*_merged(run_ranks(_step, layout.num_ranks, case, layout, preload=WITH_FAMILIES)))


def _step(environment: ProcessEnvironment, case: ImageCase, layout: Layout) -> Found:
    with _setup(environment, layout) as setup:
        return ImageTrial(setup, case, layout).found()


def transformers_on(case: ImageCase) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean loss of a step and its gradients, by transformers alone: a call for each document."""
    (model,) = run_ranks(_model, 1, case, preload=WITH_FAMILIES)
    losses, targets = [], 0
    for row in range(NUM_ROWS):
        inputs, loss_inputs = case.micro_batch([row])
        begins = torch.where(inputs["position_ids"][0] == 0)[0].tolist()
        images = [GRIDS[number] for number in case.images[row]]
        for begin, end in pairwise([*begins, case.length]):
            ids, labels = inputs["input_ids"][:, begin:end], loss_inputs["labels"][:, begin:end]
            own = [images.pop(0)] if bool((ids == IMAGE).any()) else []
            pixels = {**case._pixels(own), "mm_token_type_ids": (ids == IMAGE).long()} if own else {}
            logits = model(input_ids=ids, use_cache=False, **pixels).logits[0]
            losses.append(torch.nn.functional.cross_entropy(logits, labels[0], reduction="sum"))
            targets += int((labels != IGNORE_INDEX).sum())
    loss = torch.stack(losses).sum() / targets
    loss.backward()
    return float(loss.detach()), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def _model(environment: ProcessEnvironment, case: ImageCase) -> Any:
    """The weights of the trials, in a model that nothing was done to."""
    with _setup(environment, Layout()) as setup:
        weights = {name: one.detach() for name, one in Trial(setup, case, Layout()).model.state_dict().items()}
    model = tiny_skeleton(case.family)
    model.load_state_dict(weights)
    return model.train()
