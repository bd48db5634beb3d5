"""The standard library's own documentation and code: real text that every machine already has."""

from __future__ import annotations

import ast
import io
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hp_core.data.build import Part, build_datasets
from hp_core.data.cache import cache_directory
from hp_core.data.fields import RowText
from hp_core.data.fingerprint import file_fingerprint, fingerprint
from hp_core.data.layout import Layout
from hp_core.data.protocols import Datasets, Tokenizer, TrainableTokenizer
from hp_core.data.reading import Reading
from hp_core.data.records import Place, Row
from hp_core.data.text import TextEncoder
from hp_core.errors import InputError
from hp_plugins.datasets.arguments import (
    CacheDir,
    LongDocuments,
    MaxSeqLen,
    NumProc,
    PackingRule,
    ValidationFraction,
)

Include = Literal["docstrings", "sources", "both"]

_RULE_VERSION = 2
_SKIPPED_DIRECTORIES = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class PythonDocs:
    """The texts of the Python files under a directory, in the order of their paths."""

    name = "the Python standard library"

    def __init__(self, directory: Path, include: Include, max_files: int | None = None) -> None:
        self.directory = directory
        self.include = include
        self.max_files = max_files

    @cached_property
    def paths(self) -> list[Path]:
        """The files, test directories and installed packages left out. Raises `InputError` when there are none."""
        found = sorted(
            (path.relative_to(self.directory) for path in self.directory.rglob("*.py") if path.is_file()),
            key=lambda path: path.parts,
        )
        kept = [self.directory / path for path in found if not _SKIPPED_DIRECTORIES & set(path.parts)]
        if not kept:
            raise InputError(f"this Python has no sources of its standard library in {str(self.directory)!r}")
        return kept[: self.max_files]

    @cached_property
    def fingerprint(self) -> str:
        """Depends on the files' content, so on the Python version, not on where it is installed."""
        return fingerprint("python docs", _RULE_VERSION, self.include, *map(file_fingerprint, self.paths))

    def rows(self, fields: Sequence[str]) -> Iterator[Row | InputError]:
        """Each file's docstrings, then the file; files that can't be decoded, or parsed where needed, are left out."""
        return iter(self._rows)

    @cached_property
    def _rows(self) -> list[Row]:
        # Kept, because parsing takes longer than all else and 30 MB is little: a split with a BPE reads three times.
        return [row for number, path in enumerate(self.paths) for row in _read(number, path, self.include)]

    def locate(self, place: Place) -> str:
        """The file, and the line of the docstring."""
        return _location(self.paths[place.part], place.number)


def _location(path: Path, line: int) -> str:
    return f"{path}:{line}" if line else str(path)


def _read(number: int, path: Path, include: Include) -> list[Row]:
    content = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        source = io.TextIOWrapper(io.BytesIO(content), encoding).read()
        docstrings = [] if include == "sources" else _docstrings(source)
    except (SyntaxError, UnicodeError):
        return []
    # A docstring stands in its file too: held out apart from it, it would be seen in training all the same.
    group = fingerprint("file", content.decode("latin-1"))
    texts = docstrings if include == "docstrings" else [*docstrings, (0, source)]
    return [Row(_location(path, line), {"text": text}, place=Place(number, line), group=group) for line, text in texts]


def _docstrings(source: str) -> list[tuple[int, str]]:
    with warnings.catch_warnings():
        # Invalid escapes in someone else's code are not the user's concern.
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (docstring := ast.get_docstring(node)):
            found.append((node.body[0].lineno, docstring))
    return sorted(found)


def python_docs(
    max_files: Annotated[
        Annotated[int, Field(ge=1)] | None,
        Field(description="Files to read, in order of path; null is all."),
    ] = None,
    max_seq_len: MaxSeqLen = 1024,
    packing: PackingRule = "sequential",
    length_policy: LongDocuments = "split",
    validation_fraction: ValidationFraction = 0.02,
    include: Annotated[Include, Field(description="What of a file becomes documents.")] = "both",
    cache_dir: CacheDir = None,
    num_proc: NumProc = None,
    *,
    tokenizer: Tokenizer | TrainableTokenizer | None,
) -> Datasets:
    """Docstrings and sources of the running Python's standard library, packed into rows of `max_seq_len` tokens.

    Each docstring is a document, and each source file. Files are taken in the order of their paths, the first
    `max_files` of them; tests are left out. `validation_fraction` of the files, chosen by their text, are held out
    with their docstrings. `packing` and `length_policy` are those of `text`. Token ids are cached in `cache_dir`
    (default `$HP_CACHE_DIR`, else the user's cache directory), which `num_proc` processes fill.
    """
    source = PythonDocs(Path(sysconfig.get_path("stdlib")), include, max_files)
    text = RowText.of()
    return build_datasets(
        [Part("", source, partial(TextEncoder, text=text), text)],
        tokenizer=tokenizer,
        layout=Layout(max_seq_len, packing, length_policy),
        reading=Reading(cache_directory(cache_dir), num_proc),
        validation_fraction=validation_fraction,
    )
