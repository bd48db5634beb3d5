"""Rows with images as one batch: the rows stacked, and their images one behind the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image

from hp_core.data.images.pixels import Pixels, joined
from hp_core.data.images.positions import axis_positions
from hp_core.data.images.protocol import ImageTokenizer
from hp_core.data.protocols import Sample
from hp_core.errors import RunError
from hp_core.parallel.images import AXIS_POSITIONS, BLANK_IMAGE
from hp_plugins.collators.rows import rows

# What the batch calls the images of its rows.
IMAGES = "images"
_BLANK_SIZE = 1


@dataclass(frozen=True)
class ImageRows:
    """Collates rows of images and text.

    `has_axes` says whether the model tells tokens' places in time, height and width apart (M-RoPE). A batch without an
    image is given a blank one, unless `blanks` is false: no row of any rank has one.
    """

    tokenizer: ImageTokenizer
    has_axes: bool
    blanks: bool = True
    stack: Callable[[Sequence[Sample]], dict[str, Any]] = field(default_factory=rows)

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """The batch: tensors of the rows, `images` or `blank_image`, and `axis_positions` [rows, tokens, 3]."""
        batch: dict[str, Any] = self.stack([_without_images(sample) for sample in samples])
        samples = _in_order_of(batch, samples)
        own: list[Pixels] = [one for sample in samples if (one := dict(sample).get(IMAGES))]
        if self.has_axes:
            batch[AXIS_POSITIONS] = self._positions(batch, samples)
        if own:
            batch[IMAGES] = _tensors(joined(own))
        elif self.blanks:
            blank = Image.new("RGB", (_BLANK_SIZE, _BLANK_SIZE))
            batch[BLANK_IMAGE] = _tensors(self.tokenizer.image_inputs(blank))
        return batch

    def _positions(self, batch: Mapping[str, Any], samples: Sequence[Sample]) -> torch.Tensor:
        found = []
        for number, sample in enumerate(samples):
            inputs = dict(sample).get(IMAGES)
            grids = self.tokenizer.image_grids(inputs) if inputs else np.zeros((0, 3), dtype=np.int64)
            is_image = (batch["input_ids"][number] == self.tokenizer.image_token_id).numpy()
            found.append(axis_positions(batch["position_ids"][number].numpy(), is_image, grids))
        return torch.from_numpy(np.stack(found))


def _in_order_of(batch: Mapping[str, Any], samples: Sequence[Sample]) -> Sequence[Sample]:
    """The rows as `batch` has them, which another collator may have put in another order.

    Raises:
        RunError: it doesn't say which, or has others.
    """
    given = {sample["index"]: sample for sample in samples}
    ids = batch["sample_ids"].tolist() if isinstance(batch.get("sample_ids"), torch.Tensor) else []
    if sorted(ids) != sorted(sample["index"] for sample in samples):
        what = f"gives the sample_ids {ids} for the rows {[sample['index'] for sample in samples]}"
        raise RunError(f"dataloader.collate_fn {what}, so their images can't be put beside them")
    return [given[one] for one in ids]


def _without_images(sample: Sample) -> Any:
    return {name: value for name, value in sample.items() if name != IMAGES}


def _tensors(pixels: Pixels) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in pixels.items()}
