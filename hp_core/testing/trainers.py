"""What a trainer promises: a batch is its rows alone, and the numbers of a run don't depend on how it is cut."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_core.export.export import export_checkpoint
from hp_core.testing.checks import (
    BrokenPromiseError,
    Check,
    described,
    name_of,
    parametrize,
    require,
    require_close,
    require_equal,
)
from hp_core.testing.trainer_runs import (
    ALL_ROWS,
    BEGINNING,
    KEEPS_BEGINNING,
    NUM_STEPS,
    PACKED_RECIPE,
    ROWS,
    ROWS_PER_STEP,
    Outcome,
    TrainerCase,
    require_close_rows,
)
from hp_core.training.accounting import on_device
from hp_core.training.base import BaseTrainer
from hp_core.training.evaluation import evaluating
from hp_core.training.state import random_state

_DENOMINATOR = (
    "return from postforward what the loss returned, and divide nothing by the rows, tokens or micro-batches of a "
    "batch: the engine weighs by what `reduction` declares"
)
_DOCUMENTS = (
    "hand the position_ids on to the model, and let nothing else depend on where in a row a document is: a document's "
    "positions begin at 0"
)
_PADDING = "let labels of empty rows and of padding stay -100 in what get_batch returns, so that nothing counts them"


def trainer_checks(
    component: Callable[..., Any],
    /,
    *,
    recipe: str = PACKED_RECIPE,
    tolerance: float = 1e-5,
    skip: Mapping[str, str] | None = None,
    **arguments: Any,
) -> pytest.MarkDecorator:
    """Run a test function, `def test_trainer(check): check()`, once for each promise of a trainer.

    Args:
        component: the class that a recipe names; importable by name, since other processes import it.
        recipe: the text of a tiny recipe with the model, data and loss that it trains, and without dropout. Its
            `trainer`, optimizer, steps and batch sizes are set by the checks.
        tolerance: how far numbers may be apart that should be equal, relative to the largest of them.
        skip: why a promise doesn't apply, by its name.
        arguments: the component's recipe arguments.
    """
    return parametrize(TrainerChecks(TrainerCase(component, arguments, recipe, tolerance)).checks(), skip or {})


class TrainerChecks:
    """The checks of one trainer; the run that others are compared with is made once."""

    def __init__(self, case: TrainerCase) -> None:
        self.case = case

    def checks(self) -> list[Check]:
        """Every check, in the order in which a fault is best looked for."""
        promises: dict[str, tuple[str, Callable[[], None]]] = {
            "trains": ("a run ends well, and its steps move the weights", self.check_trains),
            "get_batch": (
                "a batch is made of its rows alone, without random numbers or a memory",
                partial(check_get_batch, self.case),
            ),
            "micro_batches": ("loss and weights don't depend on the micro-batches", self.check_micro_batches),
            "padding": ("empty rows, which fill up a step, add exactly nothing", self.check_padding),
            "lengths": (
                "rows of different lengths in a micro-batch are what they are alone",
                self.check_lengths,
            ),
            "documents": ("documents in a row don't see each other, in whatever order they are", self.check_documents),
            "no_targets": ("a step without targets moves nothing", self.check_no_targets),
            "two_ranks": ("loss and weights on two ranks are those of one process", self.check_two_ranks),
            "resume": ("a run that is stopped and resumed goes on to the last bit", self.check_resume),
            "evaluation": (
                "an evaluation leaves no trace, and its loss doesn't depend on the micro-batches",
                self.check_evaluation,
            ),
            "export": ("plain transformers loads what was trained", self.check_export),
        }
        subject = name_of(self.case.component)
        return [Check(name, subject, promise, function) for name, (promise, function) in promises.items()]

    @cached_property
    def _plain(self) -> Outcome:
        return self.case.run()

    def check_trains(self) -> None:
        """Steps, losses and weights of a run."""
        kind: object = self.case.component
        is_trainer = isinstance(kind, type) and issubclass(kind, BaseTrainer)
        require(is_trainer, "a recipe's trainer must be a class that is made from hp_core.BaseTrainer")
        run = self._plain
        require(len(run.steps) == NUM_STEPS, f"the run logs {len(run.steps)} steps instead of {NUM_STEPS}")
        for row in run.steps:
            skipped = row.get("skipped")
            require(skipped is None, f"step {row['step']} was left out: {skipped}; do the rows have targets?")
        first, last = run.weights[1], run.last
        moved = [name for name, one in last.items() if not torch.equal(one, first[name])]
        require(bool(moved), "no weight moves; does what postforward returns depend on the model's output?")

    def check_micro_batches(self) -> None:
        """Steps of one, two and four micro-batches."""
        whole = self.case.run(f"training.micro_batch_size={ROWS_PER_STEP}")
        for size in (2, 1):
            found = self._plain if size == 2 else self.case.run(f"training.micro_batch_size={size}")
            self._compare(found, whole, f"with micro-batches of {size} instead of {ROWS_PER_STEP} rows", _DENOMINATOR)

    def check_padding(self) -> None:
        """Steps that a micro-batch fills up with empty rows, and the same steps in micro-batches of one row."""
        plugin = ROWS.format(number=ROWS_PER_STEP + 2, change="as_it_is")
        wanted = self.case.run("training.micro_batch_size=1", plugin=plugin)
        found = self.case.run(f"training.micro_batch_size={ROWS_PER_STEP}", plugin=plugin)
        self._compare(found, wanted, "with two empty rows in every second step", _PADDING)

    def check_lengths(self) -> None:
        """Steps of rows that are cut at different places, together and one by one."""
        plugin = ROWS.format(number=ALL_ROWS, change="cut")
        wanted = self.case.run("training.micro_batch_size=1", plugin=plugin)
        found = self.case.run(f"training.micro_batch_size={ROWS_PER_STEP}", plugin=plugin)
        hint = f"how long the others of a micro-batch are must not matter: {_PADDING}"
        self._compare(found, wanted, "with rows of different lengths in a micro-batch", hint)

    def check_documents(self) -> None:
        """Steps of rows of several documents, and of the same in the opposite order."""
        wanted, found = (
            self.case.run(plugin=ROWS.format(number=ALL_ROWS, change=change)) for change in ("in_order", "turned")
        )
        self._compare(found, wanted, "with the documents of each row in the opposite order", _DOCUMENTS)

    def check_no_targets(self) -> None:
        """Steps of nothing but empty rows."""
        plugin = ROWS.format(number=2 * ROWS_PER_STEP, change="emptied") + KEEPS_BEGINNING
        with tempfile.TemporaryDirectory() as directory:
            finished = self.case.run_in(Path(directory), "training.train_iters=2", plugin=plugin)
            beginning, run = torch.load(finished.directory / BEGINNING, weights_only=True), Outcome.of(finished)
        for row in run.steps:
            text = f"a step of empty rows counts {row['tokens']} tokens and has the loss {row['loss']!r}; {_PADDING}"
            require(row.get("skipped") == "no tokens", text)
        require_equal(run.weights[1], beginning, "after a first step of empty rows a weight", _PADDING)
        require_equal(run.weights[2], run.weights[1], "after a step of empty rows a weight", _PADDING)

    def check_two_ranks(self) -> None:
        """One and two micro-batches on each of two ranks."""
        for size in (2, 1):
            found = self.case.run(f"training.micro_batch_size={size}", nproc=2)
            how = f"on two ranks with micro-batches of {size} rows"
            self._compare(found, self._plain, how, f"every rank must hand on what its own rows say; {_DENOMINATOR}")

    def check_resume(self) -> None:
        """Runs that end after one step and after half of them, and others that go on, one of them in a new process."""
        # What has a period of two steps is after two as at the beginning; what a module or class remembers is
        # forgotten by a new process alone.
        for stop, is_apart in ((NUM_STEPS // 2, False), (1, True)):
            with tempfile.TemporaryDirectory() as directory:
                folder = Path(directory)
                first = self.case.run_in(folder, f"training.stop_after={stop}")
                resumed = self.case.run_in(folder, f"checkpoint.resume={first.directory}", is_apart=is_apart)
                rest = Outcome.of(resumed)
            number, how = NUM_STEPS - stop, f"resumed after step {stop}{' in another process' * is_apart},"
            hint = "what a trainer remembers from step to step is in no checkpoint; let it follow from the rows"
            require_close_rows(rest.steps[-number:], self._plain.steps[-number:], 0.0, how, hint)
            require_equal(rest.last, self._plain.last, f"{how} a weight", hint)

    def check_evaluation(self) -> None:
        """Runs with an evaluation after each step, and the one without."""
        evaluated = [
            self.case.run("evaluation={every: 1}", f"training.micro_batch_size={size}") for size in (2, ROWS_PER_STEP)
        ]
        hint = "what evaluation and training both use must be as it was afterwards"
        require_close_rows(evaluated[0].steps, self._plain.steps, 0.0, "with evaluations in between,", hint)
        require_equal(evaluated[0].last, self._plain.last, "with evaluations in between, a weight", hint)
        found, wanted = (one.evaluations for one in evaluated)
        require_close_rows(found, wanted, 10 * self.case.tolerance, "with smaller micro-batches", _DENOMINATOR)

    def check_export(self) -> None:
        """Weights of an export, as transformers loads them, and what it then makes of a batch."""
        import transformers

        with self.case.trained() as trainer, tempfile.TemporaryDirectory() as directory:
            facts = trainer.run.manifest["export"]
            why = facts["why"] or "it can't be exported"
            require(bool(facts["possible"]), f"{why}; if that is meant, skip this check with the reason")
            export_checkpoint(trainer.run.directory.path, Path(directory) / "exported")
            name = transformers.AutoConfig.from_pretrained(Path(directory) / "exported").architectures[0]
            loaded = getattr(transformers, name).from_pretrained(Path(directory) / "exported").to(trainer.setup.device)
            # Adapters and replaced modules have other names.
            exported, trained = ({**one.state_dict()} for one in (loaded, trainer.model))
            shared = {name: one for name, one in trained.items() if name in exported}
            require(bool(shared), "the exported model has none of the weights by the names in the trained one")
            found = {name: exported[name] for name in shared}
            require_equal(found, shared, "the exported model", "export writes what was trained")
            dataset = trainer.datasets.train
            inputs, _ = trainer.get_batch(iter(trainer._loader(dataset, [[0, 1]])))
            inputs = on_device(inputs, trainer.setup.device)
            with evaluating(trainer.model, loaded):
                outputs = [one(**inputs) for one in (loaded, trainer.model)]
            if all("logits" in one for one in outputs):
                logits, wanted = ({"the logits": one["logits"]} for one in outputs)
                hint = "what a trainer changes of a model's computation is in no export"
                require_close(logits, wanted, self.case.tolerance, "the exported model: the largest", hint)

    def _compare(self, found: Outcome, wanted: Outcome, how: str, hint: str) -> None:
        require_close_rows(found.steps, wanted.steps, 10 * self.case.tolerance, how, hint)
        require_close(found.last, wanted.last, self.case.tolerance, f"{how} the weight", hint)


def check_get_batch(case: TrainerCase) -> None:
    """The same rows, twice and with others in between."""
    with case.trained() as trainer:
        dataset = trainer.datasets.train
        raw = list(trainer._loader(dataset, [[0, 1], [2, 3]]))
        before = random_state()
        first = _batch(trainer, raw[0], raw[1])
        drawn = _differing(random_state(), before)
        hint = "draw from a generator of your own, seeded by the rows' numbers"
        require(not drawn, f"get_batch draws from the global random stream of {', '.join(drawn)}; {hint}")
        _batch(trainer, raw[1], raw[0])
        again = _batch(trainer, raw[0], raw[1])
        for what, one, other in zip(("the model's inputs", "the loss's inputs"), again, first, strict=True):
            hint = "get_batch must not remember earlier batches: a resumed run, or another rank, has seen others"
            require_equal(other, one, f"for the same rows a second time, {what}", hint)


def _batch(trainer: BaseTrainer, batch: Any, following: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    batches: Iterator[Any] = iter([copy.deepcopy(batch), following])
    try:
        model_inputs, loss_inputs = trainer.get_batch(batches)
    except (TypeError, ValueError) as error:
        text = f"get_batch(iterator) must return (model_inputs, loss_inputs): {described(error)}"
        raise BrokenPromiseError(text) from error
    require(next(batches, None) is following, "get_batch takes more than one batch off the loader; steps count them")
    require("labels" in loss_inputs, "get_batch returns loss inputs without 'labels', by which everything is counted")
    return dict(model_inputs), dict(loss_inputs)


def _differing(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    return [name for name in ("python", "numpy", "torch") if not _same(found[name], wanted[name])]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
