"""Rows of a data set on the Hugging Face Hub, or in a directory laid out like one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from hp_core.data.fingerprint import file_fingerprint, fingerprint
from hp_core.data.records import Place, Row, columns_to_read
from hp_core.data.units import Unit, single
from hp_core.errors import ArgumentError, InputError


class HubSource:
    """One split of a data set, through `datasets.load_dataset`; its rows as they are.

    `argument` is what messages call the recipe's key that names the data set.
    """

    def __init__(self, hub_id: str, config: str | None, split: str, *, argument: str = "hub_id") -> None:
        self.hub_id = hub_id
        self.config = config
        self.split = split
        self.argument = argument
        self.name = f"{hub_id} ({split})"

    @cached_property
    def dataset(self) -> Any:
        """The `datasets.Dataset`; downloaded once, to the Hub's own cache."""
        return self._load(streaming=False)

    @cached_property
    def stream(self) -> Any:
        """The `datasets.IterableDataset`, of which nothing is downloaded but what is read."""
        return self._load(streaming=True)

    def _load(self, *, streaming: bool) -> Any:
        import datasets  # type: ignore[import-untyped]

        shows_progress = datasets.is_progress_bar_enabled()
        datasets.disable_progress_bars()
        try:
            return datasets.load_dataset(self.hub_id, self.config, split=self.split, streaming=streaming)
        # Every kind of error comes out of here, from five libraries; the user needs its text and which key to change.
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise ArgumentError(
                self.argument,
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
        dataset = self.dataset
        if (used := columns_to_read(dataset.column_names, fields)) is not None:
            dataset = dataset.select_columns(used)
        for number, values in enumerate(dataset, start=1):
            place = Place(0, number)
            yield Row(self.locate(place), values, place=place)

    def units(self, fields: Sequence[str], skip: int = 0) -> Iterator[Unit]:
        """The rows, streamed, without the first `skip`. Raises `InputError` where the stream breaks."""
        stream = self.stream
        if stream.column_names is not None and (used := columns_to_read(stream.column_names, fields)) is not None:
            stream = stream.select_columns(used)
        try:
            for number, values in enumerate(stream.skip(skip) if skip else stream, start=skip + 1):
                place = Place(0, number)
                yield single(Row(self.locate(place), values, place=place))
        except Exception as error:  # five libraries' kinds, as when it is loaded
            raise InputError(f"{self.name}: the stream broke: {type(error).__name__}: {error}") from error

    @cached_property
    def stream_fingerprint(self) -> str:
        """Depends on the data set's name, and on the names and versions of its files as the Hub tells them."""
        import datasets

        files = datasets.load_dataset_builder(self.hub_id, self.config).config.data_files or {}
        of_split = files.get(self.split)
        told = repr((list(of_split), of_split.origin_metadata)) if of_split is not None else ""
        return fingerprint("streamed hub", self.hub_id, self.config, self.split, told)

    def locate(self, place: Place) -> str:
        """The row's number, from 1."""
        return f"{self.name}: row {place.number}"
