"""Where documents come from: anything that can list them again and say whether they changed."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

from hp_core.data.columns import RowColumns
from hp_core.data.fields import RowText
from hp_core.data.fingerprint import file_fingerprint, fingerprint
from hp_core.data.readers import READERS, read_rows
from hp_core.errors import ArgumentError

# What `datasets.save_to_disk` puts beside the data of a directory.
_METADATA_FILES = frozenset({"dataset_info.json", "dataset_dict.json", "state.json"})


class Document(NamedTuple):
    """One text, and where it stands (`data/a.jsonl:12`) for messages.

    Documents with the same `group` go to the same side of a validation split; without one, the text decides.
    `values` are the document's numbers, one for each column that is asked for.
    """

    text: str
    location: str
    group: str = ""
    values: tuple[float, ...] = ()


class Source(Protocol):
    """Documents that can be read any number of times, in the same order."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash of everything that changes the documents; which columns are asked for need not be in it."""
        ...

    def documents(self) -> Iterator[Document]:
        """All documents, one by one; raises `InputError` with the place of whatever can't be read."""
        ...


class FileSource:
    """The documents of some files, one for each row (a `.txt` file is one row)."""

    def __init__(self, paths: Sequence[Path], text: RowText, columns: RowColumns | None = None) -> None:
        self.paths = tuple(paths)
        self.text = text
        self.columns = columns or RowColumns()

    @property
    def name(self) -> str:
        """The file, or how many there are."""
        return str(self.paths[0]) if len(self.paths) == 1 else f"{len(self.paths)} files"

    @cached_property
    def fingerprint(self) -> str:
        """Depends on the files' content, order and format, not on their names."""
        parts = [part for path in self.paths for part in (path.suffix.lower(), file_fingerprint(path))]
        return fingerprint("files", *self.text.identity, *parts)

    def documents(self) -> Iterator[Document]:
        """The rows' texts and columns, file by file."""
        for path in self.paths:
            for row in read_rows(path, (*self.text.fields, *self.columns.names)):
                yield Document(self.text(row), row.location, values=self.columns(row))


def expand_files(files: str | Sequence[str], *, argument: str = "files") -> list[Path]:
    """The files that paths, directories and globs stand for.

    Entries keep their order; what one entry stands for is sorted by path. A directory stands for every file with
    a known ending in it and below, except hidden ones; `**` in a glob crosses directories. Raises `ArgumentError`
    for an entry that stands for nothing, a file named twice and an ending that no reader knows.
    """
    entries = [files] if isinstance(files, str) else list(files)
    if not entries:
        raise ArgumentError(argument, "the list of files is empty")
    named_by: dict[Path, str] = {}
    expanded: list[Path] = []
    for number, entry in enumerate(entries):
        path = argument if isinstance(files, str) else f"{argument}[{number}]"
        for file in _expand(entry, path):
            identity = file.resolve()
            if identity in named_by:
                raise ArgumentError(path, f"{str(file)!r} is named twice, by {named_by[identity]!r} and {entry!r}")
            named_by[identity] = entry
            if file.suffix.lower() not in READERS:
                raise ArgumentError(path, f"{str(file)!r} has no known ending", f"known: {', '.join(READERS)}")
            expanded.append(file)
    return expanded


def _expand(entry: str, argument: str) -> list[Path]:
    path = Path(entry).expanduser()
    if path.is_dir():
        found = [file for file in sorted(path.rglob("*")) if _is_data(file, path)]
        if not found:
            raise ArgumentError(
                argument, f"the directory {entry!r} holds no data file", f"known endings: {', '.join(READERS)}"
            )
        return found
    if path.exists():
        return [path]
    if glob.has_magic(entry):
        found = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if not Path(match).is_dir()]
        if not found:
            raise ArgumentError(argument, f"no file matches {entry!r}")
        return found
    raise ArgumentError(argument, f"there is no file or directory {entry!r}")


def _is_data(file: Path, directory: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(directory).parts)
    return not hidden and file.is_file() and file.suffix.lower() in READERS and file.name.lower() not in _METADATA_FILES
