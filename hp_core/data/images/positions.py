"""Where the tokens of an image are in time, height and width: M-RoPE."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def axis_positions(
    position_ids: NDArray[np.int64], is_image: NDArray[np.bool_], grids: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The position of each token of a row in time, height and width: int64, (tokens, 3).

    Wang et al. 2024 (Qwen2-VL), section 2.1: a text's tokens have the same position on all three axes. Those of an
    image have that of the token before it plus one, and from there on their place in the image's grid; the text behind
    goes on after the largest of them. Each document begins at 0.

    Args:
        position_ids: (tokens,) which begin again with each document.
        is_image: (tokens,) which tokens stand for a part of an image.
        grids: (images, 3) how many tokens each image has in time, height and width, in the order of the row.

    Raises:
        ValueError: the images have another number of tokens than the row has for them.
    """
    if int(grids.prod(axis=1).sum()) != int(is_image.sum()):
        raise ValueError(f"images of {int(grids.prod(axis=1).sum())} tokens for {int(is_image.sum())} tokens of a row")
    found = np.repeat(position_ids[:, None], 3, axis=1)
    begins = np.flatnonzero(position_ids == 0).tolist()
    if not begins or begins[0] != 0:
        begins.insert(0, 0)
    number = 0
    for begin, end in pairwise([*begins, len(position_ids)]):
        images = np.flatnonzero(is_image[begin:end]) + begin
        if len(images):
            number = _place(found, begin, end, images.tolist(), grids, number)
    return found


def _place(
    found: NDArray[np.int64], begin: int, end: int, images: list[int], grids: NDArray[np.int64], number: int
) -> int:
    """Set the positions of one document, whose tokens of images are `images`; return that of its last image + 1."""
    token, position, taken = begin, int(found[begin, 0]), 0
    while taken < len(images):
        first = images[taken]
        found[token:first] = np.arange(position, position + first - token)[:, None]
        position += first - token
        grid = grids[number]
        size = int(grid.prod())
        found[first : first + size] = np.indices(grid).reshape(3, -1).T + position
        position += int(grid[1:].max())
        token, taken, number = first + size, taken + size, number + 1
    found[token:end] = np.arange(position, position + end - token)[:, None]
    return number
