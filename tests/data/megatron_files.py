"""Writes files of Megatron byte by byte, as its format says."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

CODES = {"B": 1, "b": 2, "h": 3, "i": 4, "q": 5, "d": 6, "f": 7, "H": 8}


def write(
    path: Path,
    documents: list[list[list[int]]],
    letter: str = "H",
    *,
    version: int = 1,
    code: int | None = None,
    magic: bytes = b"MMIDIDX\x00\x00",
    modes: bool = False,
    **changed: Any,
) -> Path:
    """A pair of files with documents of one or more sequences; `letter` is the type, as `struct` has it."""
    sequences = [sequence for document in documents for sequence in document]
    size = struct.calcsize(letter)
    lengths = changed.get("lengths", [len(sequence) for sequence in sequences])
    pointers = changed.get("pointers", [size * sum(map(len, sequences[:number])) for number in range(len(sequences))])
    bounds = changed.get("bounds", [sum(map(len, documents[:number])) for number in range(len(documents) + 1)])
    index = magic + struct.pack("<Q", version) + struct.pack("<B", CODES[letter] if code is None else code)
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(bounds))
    index += b"".join(struct.pack("<i", one) for one in lengths)
    index += b"".join(struct.pack("<q", one) for one in (*pointers, *bounds))
    index += b"\0" * len(sequences) if modes else b""
    path.with_suffix(".idx").write_bytes(index)
    path.with_suffix(".bin").write_bytes(
        b"".join(struct.pack(f"<{letter}", one) for sequence in sequences for one in sequence)
    )
    return path.with_suffix(".bin")
