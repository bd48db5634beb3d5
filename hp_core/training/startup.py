"""What has to hold of the model, the loss and the data before a step is taken."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from hp_core.config.models import AcceleratorConfig
from hp_core.data.order import check_batch
from hp_core.data.protocols import Datasets, RowDataset
from hp_core.data.rows import WithEmptyRow, as_datasets
from hp_core.entry_points import describe, raised_in
from hp_core.errors import HpError, InputError, Problem
from hp_core.model.adapters.layers import ADAPTER
from hp_core.model.compile import compiler_of
from hp_core.parallel.agreement import gathered, require_same_everywhere
from hp_core.parallel.images import outside_language_model, sees_images
from hp_core.parallel.ready import require_split
from hp_core.training.built import as_module, require_loss_call, require_without_parameters
from hp_core.training.columns import require_columns
from hp_core.training.evaluation import require_validation
from hp_core.training.loss import ComputesOnShards, LossContract, contract_of
from hp_core.training.run import Run


@contextmanager
def told_of_the_loss(what: str) -> Iterator[None]:
    """Tell an exception that a loss raises before the first step as a fault of the recipe, with where it was raised.

    Raises:
        InputError: in the place of anything that is not made for users already.
    """
    try:
        yield
    except HpError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if "torch/distributed" in Path(frame.filename).as_posix():
            raise  # another rank has failed, and will say why
        problem = Problem(f"{what}: {describe(error)}", path="loss_fn", hint=raised_in(error))
        raise InputError(problem) from error


def checked_model(built: Any, run: Run) -> nn.Module:
    """What `build_model` gave, cut into stages, replaced and sharded as the recipe says; the run tells how.

    Raises:
        InputError: it is no model, or something that the recipe says of it was not done.
    """
    model, setup = as_module(built, "model"), run.setup
    require_split(model, setup)
    if run.config.compile.mode != "off" and not setup.any_on_host(compiler_of(model) is not None):
        message = f"no module of {type(model).__name__} is compiled"
        hint = "a model builder hands compile_config on to hp_core.finish_model"
        raise InputError(Problem(message, path="compile", hint=hint))
    lines: list[str] = []
    if setup.replacer is not None:
        setup.replacer.require_applied()
        run.record(replaced_modules=setup.replacer.summaries)
        lines += setup.replacer.lines()
    if setup.planner is not None:
        setup.planner.require_applied()
        lines += setup.planner.lines()
    for line in lines:
        run.console.say(line)
    return model


def checked_loss(built: Any, run: Run) -> tuple[nn.Module, LossContract]:
    """What `build_loss` gave, on the run's device, and what it declares.

    Raises:
        InputError: it is no loss that this trainer can call, weigh and leave untrained.
    """
    loss_fn = as_module(built, "loss_fn").to(run.setup.device)
    contract = contract_of(loss_fn)
    if contract.reduction == "sample" and run.setup.sizes.cp > 1:
        message = f"{type(loss_fn).__name__} gives a value for each row, and context parallelism cuts rows"
        raise InputError(Problem(message, path="loss_fn", hint="write accelerator.cp_size: 1"))
    require_on_shards(loss_fn, run.setup.accelerator)
    require_loss_call(loss_fn, contract.columns)
    require_without_parameters(loss_fn)
    return loss_fn, contract


def require_on_shards(loss_fn: nn.Module, accelerator: AcceleratorConfig) -> None:
    """Refuse a loss that needs whole logits where loss parallelism cuts them.

    Raises:
        InputError: it does.
    """
    on_shards = isinstance(loss_fn, ComputesOnShards) and loss_fn.on_vocabulary_shards
    if accelerator.loss_parallel and not on_shards:
        message = f"{type(loss_fn).__name__} needs the logits of the whole vocabulary, and loss parallelism cuts them"
        hint = "remove accelerator.loss_parallel, or write loss_fn: causal_lm or chunked_causal_lm"
        raise InputError(Problem(message, path="loss_fn", hint=hint))


def checked_datasets(built: Any, run: Run, loss_fn: nn.Module, columns: Sequence[str]) -> Datasets:
    """What `build_dataset` gave. Every rank calls it.

    Raises:
        InputError: it has too few rows for a batch, nothing to evaluate on, or not the columns that the loss takes, or
            it is not the same on all ranks, which would read rows twice and leave others out.
    """
    datasets = as_datasets(built)
    prints = [None if one is None else one.fingerprint for one in (datasets.train, datasets.validation, datasets.test)]
    require_same_everywhere("fingerprints of the training, validation and test data", prints, run.setup)
    training = run.config.training
    train = datasets.train
    check_batch(
        None if isinstance(train, WithEmptyRow) and train.streamed is not None else len(train),
        dp_size=run.setup.dp_size,
        micro_batch_size=training.micro_batch_size,
        global_batch_size=training.global_batch_size,
    )
    require_validation(run.config.evaluation, datasets)
    # A plugin that prepares the model's inputs sees every column, so one that the loss doesn't take may be for it.
    all_used = not any("prepare_model_inputs" in record.hooks for record in run.plugins.records)
    require_columns(columns, loss_fn, datasets, run.setup, all_used=all_used)
    return datasets


def refuse_images(datasets: Datasets, trainer: str, takes_images: bool) -> None:
    """Refuse rows with images for a trainer that would leave them out.

    Raises:
        InputError: some row has one.
    """
    if takes_images:
        return
    for split in (datasets.train, datasets.validation, datasets.test):
        if isinstance(split, WithEmptyRow) and split.has_images:
            message = f"rows have images, and a {trainer} takes none"
            raise InputError(Problem(message, path="dataset", hint="write trainer: {name: vlm}"))


def may_have_images(split: RowDataset | None) -> bool:
    """Whether rows may have images, as far as that is known."""
    return split is not None and not (isinstance(split, WithEmptyRow) and split.has_images is False)


def freeze_unused(model: nn.Module, datasets: Datasets, trainer: str, takes_images: bool, run: Run) -> None:
    """Take out of training what only images would train, and say so, where no row to train on has one."""
    if not sees_images(model) or (takes_images and may_have_images(datasets.train)):
        return
    for parameter in outside_language_model(model).values():
        parameter.requires_grad_(False)
    why = "no row to train on has an image" if takes_images else f"a {trainer} takes no images"
    run.console.say(f"{why}: what images go through is frozen")


def tell_frozen(model: nn.Module, run: Run) -> None:
    """Say how much of the model is not trained, if any of it isn't. Every rank calls it."""
    own = {name: (one.numel(), one.requires_grad) for name, one in model.named_parameters()}
    # Ranks of a pipeline have other parameters, and those of others whatever they share of them whole.
    parts = [own] if run.setup.sizes.pp == 1 else gathered(own, run.setup)
    sizes = {name: found for part in parts for name, found in part.items()}
    total = sum(size for size, _ in sizes.values())
    trained = sum(size for size, is_trained in sizes.values() if is_trained)
    frozen = [name for name, (_, is_trained) in sizes.items() if not is_trained]
    if any(ADAPTER in name for name in sizes):
        layers = {name.partition(ADAPTER)[0] for name in sizes if ADAPTER in name}
        run.console.say(
            f"peft: trains {trained:,} of {total:,} parameters ({trained / total:.2%}), in {len(layers)} layers"
        )
    elif frozen:
        where = ", ".join(dict.fromkeys(".".join(name.split(".")[:2]) for name in frozen))
        run.console.say(f"frozen: {total - trained:,} of {total:,} parameters, in {where}")
