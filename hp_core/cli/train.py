"""`hp-train RECIPE`: check the recipe, start the processes it asks for, or be one of them."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hp_core.cli import processes
from hp_core.cli.checked import checked_recipe
from hp_core.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED, HpError, InputError
from hp_core.parallel.environment import ProcessEnvironment, detect
from hp_core.parallel.launching.records import LaunchFolder, attend, failure_of

if TYPE_CHECKING:
    from hp_core.config import Recipe


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `train`, which a recipe alone means too."""
    parser = subparsers.add_parser(
        "train",
        help="train a recipe (the word can be left out)",
        description="Train a recipe: alone, under torchrun or under Slurm, whichever it finds itself in.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", help="the recipe file")
    processes.add_options(parser)
    parser.add_argument(
        "-p", "--plugin", action="append", default=[], metavar="NAME", help="activate a plugin the recipe does not list"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the run that output_dir holds")
    parser.set_defaults(func=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    """Train; returns the exit code."""
    # Torch reads it as it is imported. What it warns of, a connection that is lost or a name that isn't known, is no
    # fault, or is told as one.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environment = detect(os.environ)
    folder = LaunchFolder.of_environment()
    if folder is not None:
        attend(folder, environment.rank)
    try:
        return _run(args, environment, folder)
    except KeyboardInterrupt:
        if environment.launcher == "none":
            raise
        # Before training began; the launcher got the signal too, and speaks.
        os._exit(EXIT_INTERRUPTED)
    except BaseException as error:
        if environment.launcher != "none":
            return _report(error, environment, folder)
        if isinstance(error, HpError) or not isinstance(error, Exception):
            raise
        failure = failure_of(error)
        print(failure.told(), file=sys.stderr)
        return failure.code


def _run(args: argparse.Namespace, environment: ProcessEnvironment, folder: LaunchFolder | None) -> int:
    overrides = processes.overrides(args)
    world_size = environment.world_size if environment.launcher != "none" else None
    with _importing():
        recipe = checked_recipe(args.recipe, overrides, args.plugin, world_size)
    if environment.launcher == "none" and recipe.config.launch.needs_launcher:
        return _launch(recipe, args, overrides)
    if environment.launcher != "none":
        for name, value in processes.given(args).items():
            if (name, value) != ("nproc", 1):
                option = f"--{name.replace('_', '-')} {value}"
                raise InputError(f"{option}: {environment.launcher} has started the processes already")
    from hp_core.training.session import train

    report = train(
        recipe,
        environment=environment,
        extra_plugins=tuple(args.plugin),
        overwrite=args.overwrite,
        command=sys.argv,
    )
    if not report.stopped:
        return EXIT_DONE
    if folder is None:
        return EXIT_STOPPED
    # The launcher takes another code for a failure, and makes this the run's own when all have stopped.
    folder.write_stopped(environment.rank)
    return EXIT_DONE


@contextmanager
def _importing() -> Iterator[None]:
    """Look for no garbage while torch and transformers are imported for the first time.

    They make hundreds of thousands of objects that stay, and each look through them takes a tenth of a second, now and
    all through the run.
    """
    is_first = not {"torch", "transformers"} & sys.modules.keys() and gc.isenabled()
    if is_first:
        gc.disable()
    try:
        yield
    finally:
        if is_first:
            gc.freeze()
            gc.enable()


def _launch(recipe: Recipe, args: argparse.Namespace, overrides: list[str]) -> int:
    from hp_core.parallel.launching.launch import launch

    command = [sys.executable, "-m", "hp_core", "train", str(Path(args.recipe)), *overrides]
    command += [option for name in args.plugin for option in ("--plugin", name)]
    command += ["--overwrite"] * args.overwrite
    return launch(command, recipe.config.launch)


def _report(error: BaseException, environment: ProcessEnvironment, folder: LaunchFolder | None) -> int:
    """Tell the launcher why this rank ends. Every rank may fail alike, so one of them speaks."""
    failure = failure_of(error, environment.rank)
    if folder is not None:
        folder.write_failure(failure)
    elif environment.is_main or not isinstance(error, InputError):
        print(failure.told(), file=sys.stderr)
    sys.stderr.flush()
    # A rank that has failed must not wait for the others while it shuts down.
    os._exit(failure.code)
