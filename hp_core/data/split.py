"""Which documents are held out for validation: decided by their text alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hp_core.errors import ArgumentError


def held_out(
    hashes: NDArray[np.uint64], has_text: NDArray[np.bool_], fraction: float, *, argument: str = "validation_fraction"
) -> NDArray[np.bool_]:
    """The documents that are held out: about `fraction` of them, and at least one when `fraction` is not 0.

    A document is held out when its hash lies in the first `fraction` of all hashes. So the choice depends on
    nothing but its text: other documents, their order and the seed don't matter, and copies stay together.
    """
    if not 0 <= fraction < 1:
        raise ArgumentError(argument, f"{fraction} is not a fraction from 0 to below 1")
    if fraction == 0:
        return np.zeros(len(hashes), dtype=bool)
    chosen: NDArray[np.bool_] = (hashes < np.uint64(int(fraction * 2**64))) & has_text
    if not chosen.any() and has_text.any():
        chosen = (hashes == hashes[has_text].min()) & has_text
    if has_text.any() and not (has_text & ~chosen).any():
        raise ArgumentError(
            argument,
            f"{fraction} of {np.count_nonzero(has_text)} documents leaves none to train on",
            "use a smaller fraction or more documents",
        )
    return chosen
