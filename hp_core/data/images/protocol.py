"""What texts with images need of a tokenizer beyond chats: what transformers calls a processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hp_core.data.chat.template import ChatTokenizer

# What a model takes of one image, by the name of its argument; those of several images are joined along the first axis.
ImageInputs = Mapping[str, NDArray[Any]]


@runtime_checkable
class ImageTokenizer(ChatTokenizer, Protocol):
    """A tokenizer of texts with images."""

    @property
    def image_token(self) -> str:
        """What a chat template writes once for each image."""
        ...

    @property
    def image_token_id(self) -> int:
        """The token in whose place the model sets a feature of an image; an image has many."""
        ...

    @property
    def image_fingerprint(self) -> str:
        """A hash of everything that changes the inputs of the same image."""
        ...

    def image_inputs(self, image: Image.Image) -> ImageInputs:
        """What the model takes of an RGB image. Raises `ValueError` for one that can't be used."""
        ...

    def image_text(self, inputs: ImageInputs) -> str:
        """What stands for the image in a text, in the place of `image_token`."""
        ...

    def image_pixels(self, inputs: ImageInputs) -> int:
        """How many pixels the model sees of the image."""
        ...

    def image_grids(self, inputs: ImageInputs) -> NDArray[np.int64]:
        """How many tokens each of some images has in time, height and width: int64, (images, 3).

        Raises `ValueError` for a processor that doesn't tell.
        """
        ...
