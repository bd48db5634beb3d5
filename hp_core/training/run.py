"""What a run is made of around the trainer: recipe, plugins, processes, directory, trackers and counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist
from filelock import FileLock
from torch import nn
from torch.optim import Optimizer

from hp_core.checkpoint.layout import MANIFEST
from hp_core.config import Recipe, TrainerConfig
from hp_core.data.protocols import Datasets
from hp_core.data.rows import WithEmptyRow
from hp_core.errors import HpError
from hp_core.export.assets import Assets
from hp_core.observe.console import Console
from hp_core.observe.run_directory import RunDirectory, write_json
from hp_core.observe.trackers import Tracker
from hp_core.parallel.setup import DistributedSetup
from hp_core.plugins import Plugins
from hp_core.training.state import RunState

T = TypeVar("T")


@dataclass
class Run:
    """One run as plugins see it (`run` in the observer hooks).

    `state` holds the counters, `metrics` the last logged row and `evaluation` the last evaluation's of the validation
    set; `model` and `optimizer` are set once they are built. The directory is made and the trackers are there (on the
    main rank only) when training starts: `is_open`.
    """

    recipe: Recipe
    plugins: Plugins
    setup: DistributedSetup
    directory: RunDirectory
    console: Console
    manifest: dict[str, Any]
    trackers: list[Tracker] = field(default_factory=list)
    state: RunState = field(default_factory=RunState)
    metrics: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    model: nn.Module | None = None
    optimizer: Optimizer | None = None
    is_open: bool = False
    lock: FileLock | None = None
    assets: Assets = field(default_factory=Assets)

    @property
    def config(self) -> TrainerConfig:
        """The validated recipe."""
        return self.recipe.config

    def is_over(self, num_steps: int, last_step: int) -> bool:
        """Whether nothing is left to do, of the `num_steps` of all and up to the `last_step` of this call; says so."""
        step, stops_early = self.state.step, last_step < num_steps
        asked = self.config.training.train_iters
        if asked is not None and step > asked:
            self.console.say(f"training.train_iters is {asked}, and the run has taken {step} steps: none follows")
        if step < last_step or not (stops_early or self.manifest.get("finished") == step):
            return False
        reason = f"training.stop_after is {last_step}, and " if stops_early else ""
        self.console.say(f"nothing to do: {reason}the run has taken {step} of {num_steps} steps")
        return True

    def record(self, **facts: Any) -> None:
        """Add facts to the run's manifest, and write it once the run has a directory."""
        self.manifest.update(facts)
        if self.is_open and self.setup.environment.is_main:
            write_json(self.directory.path / MANIFEST, self.manifest)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Send one row to every tracker."""
        for tracker in self.trackers:
            tracker.log(metrics)

    def log_step(self, metrics: dict[str, Any]) -> None:
        """Send the row of a step to every tracker, and show it."""
        self.metrics = metrics
        self.log(metrics)
        self.console.row(metrics)


@dataclass(frozen=True)
class Report:
    """How a run ended: steps taken, the last logged row and the last evaluation.

    `stopped` says that it was asked to stop before its end, by a signal, and has saved a checkpoint to go on from.
    """

    steps: int
    metrics: Mapping[str, Any]
    evaluation: Mapping[str, Any] | None
    stopped: bool = False


def on_main(function: Callable[[], T], setup: DistributedSetup) -> T:
    """Call `function` on the main rank alone; every rank gets what it returned or, if it failed, its `HpError`."""
    box: list[Any] = [None]
    if setup.environment.is_main:
        try:
            box = [function()]
        except HpError as error:
            box = [error]
    if setup.world_size > 1:
        dist.broadcast_object_list(box, src=0, group=setup.host_group)
    if isinstance(box[0], HpError):
        raise box[0]
    value: T = box[0]
    return value


def tell_data(datasets: Datasets, run: Run) -> None:
    """Write what became of the documents into the manifest, and show it."""
    run.record(data=data_facts(datasets))
    for line in data_lines(datasets):
        run.console.say(line)


def data_facts(datasets: Datasets) -> dict[str, Any]:
    """What became of the documents, for the manifest: rows, tokens, targets, and everything left out."""
    return {
        name: {
            "rows": None if dataset.streamed else len(dataset),
            "fingerprint": dataset.fingerprint,
            **({"columns": list(dataset.columns)} if dataset.columns else {}),
            **(dataset.report.as_dict() if dataset.report else {}),
            **_source_facts(dataset),
        }
        for name, dataset in _splits(datasets)
    }


def data_lines(datasets: Datasets) -> list[str]:
    """The same in a line for each split."""
    lines = []
    for name, dataset in _splits(datasets):
        number = "streamed" if dataset.streamed else f"{len(dataset):,}"
        line = f"{name} data: {number} rows of {dataset.max_seq_len} tokens"
        report = dataset.report
        if report is not None:
            line += f" ({report.fill:.1%} full) from {report.documents:,} documents{report.told_images()}"
            line += report.told()
        if dataset.columns:
            line += f"; columns: {', '.join(dataset.columns)}"
        lines += [line, *_source_lines(dataset)]
    return lines


def _source_facts(dataset: WithEmptyRow) -> dict[str, Any]:
    mixed = dataset.mixed
    if mixed is None:
        return {}
    parts = zip(mixed.names, mixed.parts, mixed.epoch_rows, strict=True)
    return {"sources": {name: {**part.report.as_dict(), "epoch_rows": rows} for name, part, rows in parts}}


def _source_lines(dataset: WithEmptyRow) -> Iterator[str]:
    mixed = dataset.mixed
    if mixed is None:
        return
    total = sum(mixed.epoch_rows)
    for name, part, rows in zip(mixed.names, mixed.parts, mixed.epoch_rows, strict=True):
        report = part.report
        counts = f"{report.documents:,} documents{report.told_images()}, {report.targets:,} targets{report.told()}"
        yield f"  {name}: {rows:,} rows of each epoch ({rows / total:.1%}) out of {len(part):,}; {counts}"


def _splits(datasets: Datasets) -> Iterator[tuple[str, WithEmptyRow]]:
    for name, dataset in (("train", datasets.train), ("validation", datasets.validation)):
        if dataset is not None:
            yield name, dataset if isinstance(dataset, WithEmptyRow) else WithEmptyRow(dataset)
