"""The images of documents: which tokens stand for each, and where its bytes are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from hp_core.data.images.placing import EncodedImage
from hp_core.data.images.references import ImageError, ImageSource, decoded

# One for each image, in the order of documents and of their tokens. `start` and `size` are its tokens in the document;
# `offset` and `length` are where its bytes are in the blob, or its file's path if `is_path`, of which the file's size
# and time of change are kept.
RECORD = np.dtype(
    [
        ("document", np.int64),
        ("start", np.int64),
        ("size", np.int64),
        ("pixels", np.int64),
        ("digest", np.uint64),
        ("offset", np.int64),
        ("length", np.int64),
        ("file_size", np.int64),
        ("changed_ns", np.int64),
        ("is_path", np.bool_),
    ]
)
Records = NDArray[Any]
_OUTDATED = "outdated"


@dataclass(frozen=True, eq=False)
class ImageTable:
    """Images as few arrays: `records`, `[images]` of `RECORD`, and the `blob` of bytes that they point into."""

    records: Records
    blob: NDArray[np.uint8]

    @classmethod
    def of(cls, documents: Sequence[Sequence[EncodedImage]]) -> ImageTable:
        """The images of each document."""
        rows: list[tuple[int | bool, ...]] = []
        pieces: list[bytes] = []
        offset = 0
        for number, images in enumerate(documents):
            for one in images:
                source = one.image.source
                size, changed = _state(source.path)
                held = os.fsencode(source.path) if source.path is not None else source.read()
                place = (offset, len(held), size, changed, source.path is not None)
                rows.append((number, one.start, one.size, one.image.pixels, one.image.digest, *place))
                pieces.append(held)
                offset += len(held)
        return cls(np.array(rows, dtype=RECORD), np.frombuffer(b"".join(pieces), dtype=np.uint8))

    def __len__(self) -> int:
        return len(self.records)

    def of_document(self, document: int) -> Records:
        """The records of one document."""
        first, last = np.searchsorted(self.records["document"], (document, document + 1))
        found: Records = self.records[first:last]
        return found

    def source(self, record: Any) -> ImageSource:
        """Where the image of a record is."""
        begin = int(record["offset"])
        held = self.blob[begin : begin + int(record["length"])].tobytes()
        if record["is_path"]:
            path = Path(os.fsdecode(held))
            return ImageSource(str(path), path=path)
        return ImageSource("an image of a row", held=held)

    def read(self, record: Any) -> Any:
        """The image of a record, decoded. Raises `ImageError` if it isn't the one that was encoded."""
        source = self.source(record)
        data = source.read()
        if xxhash.xxh3_64_intdigest(data) != int(record["digest"]):
            raise ImageError(f"{source.name} has changed since its row was encoded; {self._outdated()}")
        return decoded(data, source.name)

    @property
    def _mark(self) -> Path | None:
        """What says of images in a cache that they are outdated; None where they are in no cache."""
        path = getattr(self.blob, "filename", None)
        return None if path is None else Path(path).with_name(_OUTDATED)

    def _outdated(self) -> str:
        """Have the next start encode the rows anew, which sizes and times may not tell it; and what the user does."""
        mark = self._mark
        if mark is None:
            return "start again"
        try:
            mark.touch()
        except OSError:
            return f"delete {str(mark.parent)!r}, then start again"
        return "start again"

    def is_unchanged(self) -> bool:
        """Whether the files of all images are as they were, by their sizes and times, and none was found changed."""
        if self._mark is not None and self._mark.exists():
            return False
        files = self.records[self.records["is_path"]]
        return all(_state(self.source(one).path) == (int(one["file_size"]), int(one["changed_ns"])) for one in files)


def _state(path: Path | None) -> tuple[int, int]:
    """Size and time of change of a file; of one that is missing, or of none, what no file has."""
    if path is None:
        return -1, -1
    try:
        found = path.stat()
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns
