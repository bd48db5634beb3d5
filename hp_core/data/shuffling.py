"""One way to shuffle, which no update of a library may change."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def shuffled(stream: str, count: int) -> NDArray[np.int64]:
    """The numbers from 0 to below `count` in an order that depends on the text `stream` alone."""
    # numpy keeps a bit generator's raw stream stable over versions, but not Generator.permutation's.
    keys = np.random.Philox(key=philox_key(stream)).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def shuffled_passes(stream: str, count: int, first: int, number: int) -> NDArray[np.int64]:
    """`number` passes over 0 to below `count` from pass `first` on, `[number, count]`, each in an order of its own.

    A pass depends on `stream` and its own number alone. All are drawn at once: a small source may have millions.
    """
    # The generator makes four words for each value of its counter, so each pass begins at a value of its own.
    blocks = -(-count // 4)
    generator = np.random.Philox(key=philox_key(stream), counter=first * blocks)
    keys = generator.random_raw(4 * blocks * number).reshape(number, 4 * blocks)[:, :count]
    return np.argsort(keys, axis=1, kind="stable").astype(np.int64, copy=False)


def philox_key(stream: str) -> int:
    """128 bits that depend on the text alone."""
    return int.from_bytes(hashlib.sha256(stream.encode()).digest()[:16], "little")
