"""Rows of real text for benchmarks: the bytes of the standard library's sources, cut into rows."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np

from hp_core.data.protocols import Datasets, Sample

_MODULES = ("argparse", "ast", "calendar", "codecs", "datetime", "difflib", "doctest", "inspect", "ipaddress", "locale")


def write_rows(path: Path, *, num_rows: int, length: int, tokenizer: Path | None = None) -> None:
    """Write (num_rows, length + 1) tokens: those of a directory's tokenizer, or bytes."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = "\n".join((library / f"{name}.py").read_text(encoding="utf-8") for name in _MODULES)
    if tokenizer is None:
        tokens = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
    else:
        from tokenizers import Tokenizer

        ids = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode(text).ids
        tokens = np.array(ids, dtype=np.int64)
    needed = num_rows * (length + 1)
    if len(tokens) < needed:
        raise SystemExit(f"the text has {len(tokens)} tokens, and {needed} are needed")
    np.save(path, tokens[:needed].reshape(num_rows, length + 1))


class TokenRows:
    """The rows of such a file, each with its targets."""

    report = None
    columns: tuple[str, ...] = ()

    def __init__(self, path: str) -> None:
        self._rows = np.load(path)
        self.max_seq_len = self._rows.shape[1] - 1
        self.fingerprint = f"token_rows-{self._rows.shape}"

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        row = self._rows[index]
        return {
            "index": index,
            "input_ids": row[:-1],
            "labels": row[1:],
            "position_ids": np.arange(self.max_seq_len),
        }


def token_rows(path: str) -> Datasets:
    """A data set component."""
    return Datasets(TokenRows(path))
