"""Rows of a data set on the Hugging Face Hub, or in a directory laid out like one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from hp_core.data.fingerprint import file_fingerprint, fingerprint
from hp_core.data.records import Place, Row
from hp_core.errors import ArgumentError, InputError


class HubSource:
    """One split of a data set, through `datasets.load_dataset`; its rows as they are."""

    def __init__(self, hub_id: str, config: str | None, split: str) -> None:
        self.hub_id = hub_id
        self.config = config
        self.split = split
        self.name = f"{hub_id} ({split})"

    @cached_property
    def dataset(self) -> Any:
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
        """Depends on the content of the data set's cached files."""
        cached = [file_fingerprint(Path(entry["filename"])) for entry in self.dataset.cache_files]
        if not cached:
            cached = [fingerprint(*map(repr, self.dataset))]
        return fingerprint("hub", self.split, len(self.dataset), *cached)

    def rows(self, fields: Sequence[str]) -> Iterator[Row | InputError]:
        """The rows, in the data set's order."""
        used = list(dict.fromkeys(fields))
        dataset = self.dataset
        if set(used) <= set(dataset.column_names):
            dataset = dataset.select_columns(used)
        for number, values in enumerate(dataset, start=1):
            place = Place(0, number)
            yield Row(self.locate(place), values, place=place)

    def locate(self, place: Place) -> str:
        """The row's number, from 1."""
        return f"{self.name}: row {place.number}"
