"""`hp-train RECIPE`: check the recipe, start the processes it asks for, or be one of them."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from hp_core.cli.checked import checked_recipe
from hp_core.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_RUN_FAILED, EXIT_STOPPED, HpError, InputError
from hp_core.parallel.environment import ProcessEnvironment, detect

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
    parser.add_argument("--nproc", type=int, metavar="N", help="processes on this host (launch.nproc)")
    parser.add_argument(
        "-p", "--plugin", action="append", default=[], metavar="NAME", help="activate a plugin the recipe does not list"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the run that output_dir holds")
    parser.set_defaults(func=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    """Train; returns the exit code."""
    environment = detect(os.environ)
    if "HP_ERROR_FILE" in os.environ:
        _end_with_the_launcher()
    overrides = list(args.overrides)
    if args.nproc is not None:
        overrides.append(f"--launch.nproc={args.nproc}")
    try:
        world_size = environment.world_size if environment.launcher != "none" else None
        recipe = checked_recipe(args.recipe, overrides, args.plugin, world_size)
        if environment.launcher == "none" and recipe.config.launch.nproc > 1:
            return _launch(recipe, args)
        if args.nproc is not None and environment.launcher != "none" and args.nproc > 1:
            raise InputError(f"--nproc {args.nproc}: {environment.launcher} has started the processes already")
        from hp_core.training.session import train

        report = train(
            recipe,
            environment=environment,
            extra_plugins=tuple(args.plugin),
            overwrite=args.overwrite,
            command=sys.argv,
        )
        return EXIT_STOPPED if report.stopped else EXIT_DONE
    except KeyboardInterrupt:
        if environment.launcher == "none":
            raise
        # The launcher got the signal too, and speaks.
        os._exit(EXIT_INTERRUPTED)
    except Exception as error:
        if environment.launcher == "none":
            raise
        return _report(error, environment)


def _end_with_the_launcher() -> None:
    """Have the kernel kill this rank when the launcher is gone, so that no orphan trains on beside a resumed run."""
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _launch(recipe: Recipe, args: argparse.Namespace) -> int:
    from hp_core.parallel.launch import launch

    command = [sys.executable, "-m", "hp_core", "train", str(Path(args.recipe)), *args.overrides]
    command += [f"--launch.nproc={recipe.config.launch.nproc}"] * (args.nproc is not None)
    command += [option for name in args.plugin for option in ("--plugin", name)]
    command += ["--overwrite"] * args.overwrite
    return launch(command, recipe.config.launch)


def _report(error: Exception, environment: ProcessEnvironment) -> int:
    """Tell the launcher why this rank ends. Every rank may fail alike, so one of them speaks."""
    known = isinstance(error, HpError)
    text = str(error) if known else "".join(traceback.format_exception(error))
    code = error.exit_code if isinstance(error, HpError) else EXIT_RUN_FAILED
    error_file = os.environ.get("HP_ERROR_FILE")
    if error_file is not None:
        from hp_core.parallel.launch import write_error

        write_error(Path(error_file), environment.rank, code, text)
    elif environment.is_main or not isinstance(error, InputError):
        print(f"[rank {environment.rank}] {text}", file=sys.stderr)
    sys.stderr.flush()
    # A rank that has failed must not wait for the others while it shuts down.
    os._exit(code)
