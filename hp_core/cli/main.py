"""`hp-train`: the command line, dispatch to one module a command, and errors turned into text and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from hp_core.cli import check, config, data, export, launch, new_plugin, plugins, schema, train
from hp_core.errors import EXIT_INTERRUPTED, HpError, InputError, Problem
from hp_core.parallel.launching.records import failure_of
from hp_core.threads import leave

_EPILOG = """\
Any recipe value can be given on the command line: --training.train_iters=10 --optimizer.lr=1e-4
--plugins='[my_plugin]'. The value is read as if it were written in the recipe.

exit codes: 0 done, 1 the run failed, 2 the recipe, command line or plugins are wrong,
75 stopped by SIGTERM, SIGUSR1 or Ctrl-C with a checkpoint to go on from. Before training begins,
or by a second signal, the signal ends the run at once: 130 Ctrl-C, 143 SIGTERM, 138 SIGUSR1.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, or end with it if no `argv` is given."""
    if argv is None:
        leave(_main(sys.argv[1:]))
    return _main(argv)


def _main(arguments: Sequence[str]) -> int:
    _find_modules_here()
    try:
        known, overrides = _split(arguments)
        args = _parser().parse_args(_with_command(known))
        args.overrides = overrides
        if overrides and not getattr(args, "takes_overrides", False):
            raise InputError(f"{args.command} takes no recipe values: {overrides[0]}")
        code: int = args.func(args)
        return code
    except HpError as error:
        print(failure_of(error).told(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe (head) went away; python would complain again while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _find_modules_here() -> None:
    """Let a recipe name modules of the working directory, behind everything that is installed.

    The same for every way to start: a console script, `python -m`, torchrun's workers.
    """
    here = os.getcwd()
    sys.path[:] = [entry for entry in sys.path if entry not in ("", here)] + [here]


def _with_command(arguments: list[str]) -> list[str]:
    """Training is what a recipe alone asks for; every other job has a word."""
    if arguments and (arguments[0] in _COMMANDS or arguments[0] in ("-h", "--help", "--version")):
        return arguments
    return ["train", *arguments]


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate recipe values (`--a.b=c`, and root keys such as `--output_dir=x`) from options."""
    known: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if argument.startswith("--") and name not in _OPTIONS and (equals or "." in name):
            if not equals:
                raise InputError(Problem(f"{argument}: a recipe value needs '='", hint=f"write {argument}=VALUE"))
            overrides.append(argument)
        else:
            known.append(argument)
    return known, overrides


_OPTIONS = frozenset(
    {
        *("--nproc", "--plugin", "--overwrite", "--diff", "--json", "--load", "--strict", "--hooks", "--kind", "--to"),
        *("--rows", "--split", "--step", "--dtype", "--max-shard-size", "--help", "--version"),
        *("--nodes", "--name", "--gpus", "--cpus", "--memory", "--time", "--partition", "--account", "--qos"),
        *("--constraint", "--signal-before", "--no-requeue", "--workdir", "--setup", "--image", "--namespace"),
        *("--volume", "--env", "--grace", "--restarts"),
        *("--nnodes", "--node-rank", "--rdzv-endpoint", "--rdzv-id", "--max-restarts"),
    }
)
_COMMANDS = {
    "train": train,
    "check": check,
    "launch": launch,
    "data": data,
    "export": export,
    "config": config,
    "schema": schema,
    "plugins": plugins,
    "new-plugin": new_plugin,
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise InputError(Problem(message, hint=f"see '{self.prog} --help'"))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hp-train",
        description="Train transformers models from one YAML recipe, on one CPU or a thousand GPUs.",
        usage="hp-train RECIPE [--nproc N] [--section.key=VALUE ...]\n       hp-train COMMAND ...",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, prog="hp-train")
    for command in _COMMANDS.values():
        command.add_parser(subparsers)
    return parser


class _ShowVersion(argparse.Action):
    """Like argparse's own, but reads the metadata only when asked: importing its reader is a third of a start."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"hp-train {version('hyperparallel')}")
        except PackageNotFoundError:
            print("hp-train (not installed)")
        parser.exit()
