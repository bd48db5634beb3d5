"""Hashes that identify data: of a list of parts, of a file's content, of a document."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_BLOCK = 1 << 20


def fingerprint(*parts: str | bytes | int | float | None) -> str:
    """A hash of the parts in order; no two different lists of parts are joined into the same bytes."""
    digest = hashlib.sha256()
    for part in parts:
        kind, content = (
            type(part).__name__,
            part if isinstance(part, bytes) else str(part).encode(errors="surrogatepass"),
        )
        digest.update(f"{kind}:{len(content)}:".encode() + content)
    return digest.hexdigest()[:32]


def file_fingerprint(path: Path) -> str:
    """A hash of the file's bytes, and of nothing else: a moved or renamed file keeps it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()[:32]


def ends_fingerprint(path: Path) -> str:
    """A hash of the file's size and of its first and last megabyte, for files that take too long to be read whole."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        first = file.read(_BLOCK)
        file.seek(max(0, size - _BLOCK))
        return fingerprint(size, first, file.read(_BLOCK))


def document_hash(content: bytes) -> int:
    """64 bits that depend on the document's UTF-8 text alone."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
