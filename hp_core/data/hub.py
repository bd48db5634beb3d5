"""Documents of a data set on the Hugging Face Hub, or in a directory laid out like one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from hp_core.data.columns import RowColumns
from hp_core.data.fields import Row, RowText
from hp_core.data.fingerprint import file_fingerprint, fingerprint
from hp_core.data.sources import Document
from hp_core.errors import ArgumentError


class HubSource:
    """One split of a data set, through `datasets.load_dataset`; each row is a document."""

    def __init__(
        self, hub_id: str, config: str | None, split: str, text: RowText, columns: RowColumns | None = None
    ) -> None:
        self.hub_id = hub_id
        self.config = config
        self.split = split
        self.text = text
        self.columns = columns or RowColumns()
        self.name = f"{hub_id} ({split})"

    @cached_property
    def rows(self) -> Any:
        """The `datasets.Dataset`; downloaded once, to the Hub's own cache."""
        import datasets  # type: ignore[import-untyped]

        shows_progress = datasets.is_progress_bar_enabled()
        datasets.disable_progress_bars()
        try:
            return datasets.load_dataset(self.hub_id, self.config, split=self.split)
        # Every kind of error comes out of here, from five libraries; the user needs its text and which key to change.
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise ArgumentError(
                "hub_id",
                f"the data set {self.hub_id!r} can't be loaded: {type(error).__name__}: {reason}",
                "check the name, hub_config and split; without a network, name local files with `files`",
            ) from error
        finally:
            if shows_progress:
                datasets.enable_progress_bars()

    @cached_property
    def fingerprint(self) -> str:
        """Depends on the content of the data set's cached files and on what is taken from them."""
        cached = [file_fingerprint(Path(entry["filename"])) for entry in self.rows.cache_files]
        if not cached:
            parts: list[str | float] = []
            for document in self.documents():
                parts += (document.text, *document.values)
            cached = [fingerprint(*parts)]
        return fingerprint("hub", self.split, len(self.rows), *self.text.identity, *cached)

    def documents(self) -> Iterator[Document]:
        """The rows' texts and columns, in the data set's order."""
        used = list(dict.fromkeys((*self.text.fields, *self.columns.names)))
        rows = self.rows.select_columns(used) if set(used) <= set(self.rows.column_names) else self.rows
        for number, fields in enumerate(rows, start=1):
            row = Row(f"{self.name}: row {number}", fields)
            yield Document(self.text(row), row.location, values=self.columns(row))
