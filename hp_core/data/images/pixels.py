"""The images of rows as a model takes them, read when a row is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_core.data.images.protocol import ImageTokenizer
from hp_core.data.images.references import ImageError
from hp_core.data.images.table import ImageTable, Records
from hp_core.errors import RunError

# What the images of some rows are together, by the name of the model's argument.
Pixels = Mapping[str, NDArray[Any]]


class ImageTransform:
    """Reads images, decodes them and makes of them what the model takes."""

    def __init__(self, tokenizer: ImageTokenizer) -> None:
        self.tokenizer = tokenizer

    def __call__(self, table: ImageTable, records: Records, locate: Callable[[int], str]) -> Pixels:
        """The images of some records, joined.

        Raises:
            RunError: one can't be read, or isn't the one that was encoded.
        """
        inputs = []
        for record in records:
            try:
                inputs.append(self.tokenizer.image_inputs(table.read(record)))
            except (ImageError, ValueError) as error:
                where = locate(int(record["document"]))
                raise RunError(f"{where or 'an image'}: {error}") from error
        return joined(inputs)


def joined(inputs: Sequence[Pixels]) -> Pixels:
    """The inputs of several images, or of several rows, one behind the other along the first axis."""
    return {name: np.concatenate([one[name] for one in inputs]) for name in inputs[0]} if inputs else {}
