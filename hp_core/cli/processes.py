"""The options that say how many processes to start where: short for values of the recipe's `launch` section."""

from __future__ import annotations

import argparse

_NAMES = ("nproc", "nnodes", "node_rank", "rdzv_endpoint", "rdzv_id", "max_restarts")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them to a command."""
    parser.add_argument("--nproc", type=int, metavar="N", help="processes on this machine (launch.nproc)")
    parser.add_argument("--nnodes", metavar="N|MIN:MAX", help="machines, each of which runs this command")
    parser.add_argument("--node-rank", type=int, metavar="R", help="this machine's number, from 0")
    parser.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="where the machines meet, HOST being one of them")
    parser.add_argument("--rdzv-id", metavar="ID", help="what tells runs that meet at the same place apart")
    parser.add_argument("--max-restarts", type=int, metavar="N", help="how often to start over when a process fails")


def given(args: argparse.Namespace) -> dict[str, object]:
    """The options that were given, by the names of the values that they are short for."""
    return {name: getattr(args, name) for name in _NAMES if getattr(args, name) is not None}


def overrides(args: argparse.Namespace) -> list[str]:
    """All recipe values of a command line: those written out, and those that have an option."""
    return [*args.overrides, *(f"--launch.{name}={value}" for name, value in given(args).items())]
