"""A row of one image, for a question to the model before it is trained."""

from __future__ import annotations

import numpy as np
from PIL import Image

from hp_core.data.images.protocol import ImageTokenizer
from hp_core.data.protocols import IGNORED_LABEL, Sample

_SIZE = (64, 48)


def probe_row(processor: ImageTokenizer) -> Sample:
    """An image and the end token, without a target."""
    inputs = processor.image_inputs(Image.new("RGB", _SIZE, (90, 160, 30)))
    (tokens,) = processor.place([processor.image_text(inputs)])
    ids = np.append(tokens.ids, processor.eos_id)
    return {
        "index": 0,
        "input_ids": ids,
        "labels": np.full(len(ids), IGNORED_LABEL, dtype=np.int64),
        "position_ids": np.arange(len(ids)),
        "is_padding": np.zeros(len(ids), dtype=np.bool_),
        "images": inputs,
    }
