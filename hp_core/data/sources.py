"""Files as a source of rows, and which files a recipe means."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path

from hp_core.data.fingerprint import ends_fingerprint, file_fingerprint, fingerprint
from hp_core.data.readers import READERS, ending_of, is_unread, location_of, read_rows, read_units
from hp_core.data.records import Place, Row
from hp_core.data.units import Unit
from hp_core.errors import ArgumentError, InputError

# What `datasets.save_to_disk` puts beside the data of a directory.
_METADATA_FILES = frozenset({"dataset_info.json", "dataset_dict.json", "state.json"})


class FileSource:
    """The rows of some files (a `.txt` file is one row)."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)

    @property
    def name(self) -> str:
        """The file, or how many there are."""
        return str(self.paths[0]) if len(self.paths) == 1 else f"{len(self.paths)} files"

    @cached_property
    def fingerprint(self) -> str:
        """Depends on the files' content, order and format, not on their names."""
        parts = [part for path in self.paths for part in (ending_of(path), file_fingerprint(path))]
        return fingerprint("files", *parts)

    def rows(self, fields: Sequence[str]) -> Iterator[Row | InputError]:
        """The rows, file by file."""
        for number, path in enumerate(self.paths):
            yield from read_rows(path, fields, number)

    def units(self, fields: Sequence[str], skip: int = 0) -> Iterator[Unit]:
        """The lines or rows, file by file, without the first `skip`; those are read, and lines not parsed."""
        every = (unit for number, path in enumerate(self.paths) for unit in read_units(path, fields, number))
        return islice(every, skip, None)

    @cached_property
    def stream_fingerprint(self) -> str:
        """Depends on the files' sizes, order and format, and on the content of each one's first and last megabyte."""
        parts = [part for path in self.paths for part in (ending_of(path), ends_fingerprint(path))]
        return fingerprint("streamed files", *parts)

    def locate(self, place: Place) -> str:
        """The file, and the line or row in it."""
        return location_of(self.paths[place.part], place.number)


def expand_files(files: str | Sequence[str], *, argument: str = "files") -> list[Path]:
    """The files that paths, directories and globs stand for.

    Entries keep their order; what one entry stands for is sorted by path. A directory stands for every file with
    a known ending in it and below, except hidden ones; `**` in a glob crosses directories. Raises `ArgumentError`
    for an entry that stands for nothing, a file named twice, an ending that no reader knows and a data file that is
    compressed otherwise than by gzip, in a directory too.
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
            if is_unread(file):
                hint = "decompress it, or write .gz, of text formats only"
                raise ArgumentError(path, f"{str(file)!r} is compressed in a way that can't be read", hint)
            if ending_of(file) not in READERS:
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
    is_data = ending_of(file) in READERS or is_unread(file)
    return not hidden and file.is_file() and is_data and file.name.lower() not in _METADATA_FILES
