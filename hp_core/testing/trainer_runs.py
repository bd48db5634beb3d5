"""Tiny runs of a trainer under test, and what they leave: logged numbers and weights."""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from hp_core.checkpoint.layout import complete_checkpoints
from hp_core.cli.checked import checked_recipe
from hp_core.config import Target
from hp_core.data.protocols import EMPTY_ROW, Datasets, RowDataset, Sample
from hp_core.data.rows import as_datasets
from hp_core.errors import InputError
from hp_core.export.reading import StoredModel
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.testing.checks import require
from hp_core.testing.parts import TINY_RECIPE
from hp_core.testing.runs import FinishedRun, run_recipe, undisturbed
from hp_core.training.base import BaseTrainer
from hp_core.training.run import Run
from hp_core.training.session import train

NUM_STEPS, ROWS_PER_STEP = 4, 4
_TIMES = frozenset({"step_time_s", "data_time_s", "tokens_per_second", "tflops_per_second", "mfu", "eval_time_s"})
# Rows of several documents, which a trainer must keep apart.
PACKED_RECIPE = TINY_RECIPE.replace("  validation_rows: 2\n", "  validation_rows: 2\n  documents: 3\n")
# Gradients of nearly 0 stay so small here, where Adam would blow their rounding up.
_DESCENT = "optimizer={_target_: hp_core.testing.parts.plain_descent}"


@dataclass(frozen=True)
class TrainerCase:
    """A trainer under test: the class with its recipe arguments, and the recipe that it trains."""

    component: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    recipe: str = PACKED_RECIPE
    tolerance: float = 1e-5

    def overrides(self, *more: str) -> list[str]:
        """Four steps of four rows by plain descent, logged each, without evaluations, and what `more` says."""
        path = f"{self.component.__module__}.{getattr(self.component, '__qualname__', '')}"
        trainer = json.dumps({"_target_": path, **self.arguments})
        fixed = [
            f"trainer={trainer}",
            _DESCENT,
            "lr_scheduler=null",
            "training.log_every=1",
            "training.stop_after=null",
        ]
        fixed += ["training.train_epochs=null", "training.train_samples=null", f"training.train_iters={NUM_STEPS}"]
        fixed += [f"training.global_batch_size={ROWS_PER_STEP}", "training.micro_batch_size=2"]
        fixed += ["evaluation={every: 0, at_end: false}", "checkpoint={save_every: 1, keep_last: null}"]
        changed = {one.partition("=")[0] for one in more}
        return [*(one for one in fixed if one.partition("=")[0] not in changed), *more]

    def run(self, *more: str, nproc: int = 1, plugin: str | None = None) -> Outcome:
        """Train, and read what the run has left."""
        with tempfile.TemporaryDirectory() as directory:
            return Outcome.of(self.run_in(Path(directory), *more, nproc=nproc, plugin=plugin))

    def run_in(
        self, folder: Path, *more: str, nproc: int = 1, plugin: str | None = None, is_apart: bool = False
    ) -> FinishedRun:
        """Train in a folder that stays; `is_apart` is in a new process, which remembers nothing."""
        if plugin is not None:
            (folder / "kit_rows.py").write_text(plugin, encoding="utf-8")
        plugins = [] if plugin is None else ["kit_rows.py"]
        return run_recipe(self.recipe, self.overrides(*more), folder, nproc=nproc, plugins=plugins, is_apart=is_apart)

    @contextmanager
    def trained(self) -> Iterator[BaseTrainer]:
        """The trainer itself, after a run."""
        built: list[BaseTrainer] = []

        class Kept(Target):
            def build(self, **runtime: Any) -> Any:
                built.append(super().build(**runtime))
                return built[-1]

        with tempfile.TemporaryDirectory() as directory, undisturbed():
            path = Path(directory) / "recipe.yaml"
            path.write_text(self.recipe, encoding="utf-8")
            short = ("training.train_iters=1", f"training.micro_batch_size={ROWS_PER_STEP}")
            options = [f"--{one}" for one in self.overrides(*short, f"output_dir={directory}/run")]
            recipe = checked_recipe(str(path), options, (), 1)
            target = recipe.config.trainer
            kept = Kept(**{one.name: getattr(target, one.name) for one in dataclasses.fields(Target)})
            config = recipe.config.model_copy(update={"trainer": kept})
            train(dataclasses.replace(recipe, config=config), environment=ProcessEnvironment())
            yield built[0]


@dataclass(frozen=True)
class Outcome:
    """The logged numbers, without times, of steps and of evaluations, and the weights after each step."""

    steps: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Mapping[str, Any], ...]
    weights: Mapping[int, Mapping[str, torch.Tensor]]

    @classmethod
    def of(cls, run: FinishedRun) -> Outcome:
        """What a run has left in its directory."""
        rows = [{name: value for name, value in row.items() if name not in _TIMES} for row in run.rows]
        weights = {}
        for checkpoint in complete_checkpoints(run.directory):
            stored = StoredModel(checkpoint.path)
            weights[checkpoint.step] = dict(stored.read(list(stored.tensors)))
        steps = tuple(row for row in rows if "loss" in row)
        return cls(steps, tuple(row for row in rows if "eval_loss" in row), weights)

    @property
    def last(self) -> Mapping[str, torch.Tensor]:
        """The weights at the end."""
        return self.weights[max(self.weights)]


def require_close_rows(
    found: tuple[Mapping[str, Any], ...], wanted: tuple[Mapping[str, Any], ...], tolerance: float, how: str, hint: str
) -> None:
    """Compare logged numbers; those of tokens must be the same.

    Raises:
        BrokenPromiseError: names the first step and number that differ.
    """
    require(len(found) == len(wanted), f"{how} there are {len(found)} rows instead of {len(wanted)}; {hint}")
    for row, other in zip(found, wanted, strict=True):
        odd = sorted(row.keys() ^ other.keys())
        require(not odd, f"{how} only one of two runs logs {odd[:1]}; {hint}")
        # Counts first: where another number of tokens counts, the rest follows.
        for name in sorted(other, key=lambda one: ("tokens" not in one, "loss" not in one, one)):
            same = _is_close(row[name], other[name], 0.0 if "tokens" in name else tolerance, _largest(wanted, name))
            text = f"{how} {name!r} of step {other['step']} is {row[name]!r} instead of {other[name]!r}; {hint}"
            require(same, text)


def _largest(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """The largest number of that name."""
    return max((abs(row[name]) for row in rows if isinstance(row.get(name), float)), default=0.0)


def _is_close(one: Any, other: Any, tolerance: float, largest: float) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        # Numbers that are small throughout are compared as strictly as others.
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance * min(1.0, largest))
    return bool(one == other)


# A plugin that changes which rows there are, and what they hold; run directories hold its text.
ROWS = """\
from hp_core import hookimpl
from hp_core.testing.trainer_runs import {change}, keep_beginning, with_rows


@hookimpl(wrapper=True)
def build_dataset():
    return with_rows((yield), {number}, {change})
"""
ALL_ROWS = 10**9

# More of that plugin: the weights before the first step, in a file of the run.
BEGINNING = "beginning.pt"
KEEPS_BEGINNING = """

@hookimpl
def on_train_start(run):
    keep_beginning(run)
"""

# A row, and an empty one of the same data.
Change = Callable[[Sample, Sample], Mapping[str, Any]]


def as_it_is(row: Sample, empty: Sample) -> Mapping[str, Any]:
    """The row."""
    del empty
    return row


def in_order(row: Sample, empty: Sample) -> Mapping[str, Any]:
    """The row, one that `turned` can change."""
    del empty
    return row


def emptied(row: Sample, empty: Sample) -> Mapping[str, Any]:
    """The empty row."""
    del row
    return empty


def cut(row: Sample, empty: Sample) -> Mapping[str, Any]:
    """The row without its end, of which four rows in a row lack more and more; padding is what comes behind.

    It is padded as the data set does it, by tokens that a model may know, or else like an empty row.
    """
    size, end = len(row["input_ids"]), _end(row)
    # How a row without padding would be padded isn't known.
    if end == size and "is_padding" in row:
        return row
    kept = end - end * (row["index"] % 4) // 5
    blank = _arrays(row if end < size else empty)
    parts = {
        name: np.concatenate([value[:kept], np.repeat(blank[name][-1:], size - kept, axis=0)])
        for name, value in _arrays(row).items()
    }
    parts["position_ids"][kept:] = np.arange(size - kept)
    return {**row, **parts, "is_padding": np.arange(size) >= kept}


def turned(row: Sample, empty: Sample) -> Mapping[str, Any]:
    """The row with its documents in the opposite order, the last one first."""
    del empty
    size, end = len(row["input_ids"]), _end(row)
    begins = _begins(row)
    pieces = [np.arange(begin, until) for begin, until in zip(begins, [*begins[1:], end], strict=True)]
    order = np.concatenate([*reversed(pieces), np.arange(end, size)])
    return {**row, **{name: value[order] for name, value in _arrays(row).items()}}


def keep_beginning(run: Run) -> None:
    """Write the weights of a run that has one process."""
    assert run.model is not None
    torch.save(dict(run.model.state_dict()), run.directory.path / BEGINNING)


def with_rows(built: object, number: int, change: Change) -> Datasets:
    """The training data with its first rows alone, each of them changed."""
    datasets = as_datasets(built)
    return dataclasses.replace(datasets, train=_Rows(datasets.train, number, change))


def _begins(row: Sample) -> list[int]:
    """Where its documents begin."""
    return [0, *(np.flatnonzero(np.diff(row["position_ids"][: _end(row)]) != 1) + 1).tolist()]


def _usable(dataset: RowDataset, change: Change) -> list[int]:
    """The rows that show what a change does: images have their places among the tokens, and documents are several."""
    number = range(len(dataset))
    if change not in (cut, in_order, turned):
        return list(number)
    found = [index for index in number if "images" not in dataset[index]]
    what = "are without images, which this check can't move"
    if change is not cut:
        found = [index for index in found if len(_begins(dataset[index])) > 1]
        what = "hold several documents and no image"
    if len(found) < ROWS_PER_STEP:
        hint = f"give {ROWS_PER_STEP} or more, or skip the check"
        raise InputError(f"{len(found)} of {len(number)} rows {what}; {hint}")
    return found


def _end(row: Sample) -> int:
    """Where the padding behind the last token begins."""
    size = len(row["input_ids"])
    tokens = np.flatnonzero(~row["is_padding"]) if "is_padding" in row else np.arange(size)
    return int(tokens[-1]) + 1 if tokens.size else 0


def _arrays(row: Sample) -> dict[str, NDArray[Any]]:
    """Those of a value for each token, as collators tell them."""
    size = len(row["input_ids"])
    return {name: one for name, one in row.items() if isinstance(one, np.ndarray) and one.shape[:1] == (size,)}


class _Rows:
    report = None

    def __init__(self, dataset: RowDataset, number: int, change: Change) -> None:
        self._dataset, self._change = dataset, change
        self._chosen = _usable(dataset, change)[:number]
        self.max_seq_len = dataset.max_seq_len
        # The order of rows follows from it, which must be the same whatever a row holds.
        self.fingerprint = f"{dataset.fingerprint}-{number}"

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int, /) -> Sample:
        empty = self._dataset[EMPTY_ROW]
        row = empty
        if index != EMPTY_ROW:
            row = cast(Sample, {**self._dataset[self._chosen[index]], "index": index})
        return cast(Sample, self._change(row, empty))
