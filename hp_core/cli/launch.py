"""`hp-train launch`: print the job file that runs a recipe under Slurm, on Kubernetes or with torchrun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hp_core.cli.checked import checked_recipe
from hp_core.errors import InputError, Problem
from hp_core.jobs.job import (
    Job,
    contradictions,
    default_name,
    number_of_gpus,
    number_of_nodes,
    open_number_of_nodes,
    positive,
    replaced,
)

if TYPE_CHECKING:
    from hp_core.config import Recipe

_EPILOG = """\
  hp-train launch slurm recipe.yaml --nodes 4 --nproc 8 --time 12:00:00 | sbatch
  hp-train launch k8s recipe.yaml --image registry/train:1 --volume work:/workspace | kubectl apply -f -
  hp-train launch torchrun recipe.yaml --nodes 2 --nproc 8 --rdzv-endpoint host-1:29500
"""


# What stands for the variables of a job while it is checked.
_SAMPLES = {"launch.rdzv_endpoint": "host:29500", "launch.rdzv_id": "job", "launch.node_rank": "0"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `hp-train`."""
    parser = subparsers.add_parser(
        "launch",
        help="print a job file for Slurm, Kubernetes or torchrun",
        description="Print the job file that runs a recipe on a cluster. The recipe and its values are checked first. "
        "A job that is interrupted goes on from its newest checkpoint.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    kinds = parser.add_subparsers(dest="kind", metavar="slurm|k8s|torchrun", required=True)
    _add_slurm(kinds)
    _add_kubernetes(kinds)
    _add_torchrun(kinds)


def _add_kind(
    kinds: argparse._SubParsersAction[argparse.ArgumentParser], name: str, help: str
) -> argparse.ArgumentParser:
    parser = kinds.add_parser(name, help=help, description=f"Print {help}.", allow_abbrev=False)
    parser.add_argument("recipe", help="the recipe file")
    parser.add_argument(
        "-p", "--plugin", action="append", default=[], metavar="NAME", help="activate a plugin the recipe does not list"
    )
    parser.add_argument("--nodes", type=_nodes, metavar="N", help="machines (launch.nnodes)")
    parser.add_argument("--nproc", type=int, metavar="N", help="processes on each machine (launch.nproc)")
    parser.add_argument("--name", help="the job's name; the recipe's unless given")
    parser.set_defaults(func=run, takes_overrides=True)
    return parser


def _nodes(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        message = f"{text!r} is no whole number: a job asks for a certain number of machines; a range is for the "
        message += "--nnodes of hp-train and torchrun themselves"
        raise argparse.ArgumentTypeError(message) from None


def _add_resources(parser: argparse.ArgumentParser, memory: str) -> None:
    gpus = "GPUs of each machine; one a process unless given, none where training.device is cpu"
    parser.add_argument("--gpus", type=int, metavar="N", help=gpus)
    parser.add_argument("--cpus", type=int, metavar="N", help="CPUs of each machine")
    parser.add_argument("--memory", metavar="SIZE", help=f"memory of each machine, such as {memory}")


def _add_slurm(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_kind(kinds, "slurm", "a batch script for Slurm's sbatch")
    _add_resources(parser, "64G")
    parser.add_argument("--time", metavar="LIMIT", help="how long one start of the job may take, as sbatch takes it")
    parser.add_argument("--partition", help="where to run")
    parser.add_argument("--account", help="who pays")
    parser.add_argument("--qos", help="quality of service")
    parser.add_argument("--constraint", help="what the machines must have")
    parser.add_argument(
        "--signal-before",
        type=int,
        default=300,
        metavar="SECONDS",
        help="how long before the end of its time the job saves and stops (default: 300)",
    )
    parser.add_argument("--no-requeue", action="store_true", help="leave it at one start")
    parser.add_argument("--workdir", metavar="DIR", help="where to start; the working directory unless given")
    parser.add_argument(
        "--setup",
        action="append",
        default=[],
        metavar="COMMAND",
        help="a shell command to run first, such as 'source venv/bin/activate'",
    )


def _add_kubernetes(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_kind(kinds, "k8s", "a job of Kubeflow Trainer for kubectl")
    _add_resources(parser, "64Gi")
    parser.add_argument("--image", help="the image of the container, one that has hp-train in it")
    parser.add_argument("--namespace", help="where the job runs; kubectl's own unless given")
    parser.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="CLAIM:PATH",
        help="a claim to mount at a path of the container; the output_dir has to be below one",
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of the container's environment"
    )
    parser.add_argument(
        "--grace",
        type=int,
        default=300,
        metavar="SECONDS",
        help="how long a pod that is asked to end may take to save (default: 300)",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=10,
        metavar="N",
        help="how often the pods are started anew when one ends early (default: 10)",
    )
    parser.add_argument(
        "--workdir", default="/workspace", metavar="DIR", help="where to start in the container (default: /workspace)"
    )


def _add_torchrun(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_kind(kinds, "torchrun", "the torchrun command, the same for every machine")
    parser.add_argument(
        "--rdzv-endpoint", metavar="HOST[:PORT]", help="where the machines meet, HOST being one of them"
    )


def run(args: argparse.Namespace) -> int:
    """Print the job file; raises `InputError` with everything that is wrong with the recipe or the job."""
    return {"slurm": _slurm, "k8s": _kubernetes, "torchrun": _torchrun}[args.kind](args)


def _slurm(args: argparse.Namespace) -> int:
    from hp_core.jobs import slurm

    names = ("time", "partition", "account", "qos", "constraint", "signal_before")
    settings = slurm.Settings(**{name: getattr(args, name) for name in names}, setup=tuple(args.setup))
    asked = _Asked.by(args, args.workdir or os.getcwd(), resumes=not args.no_requeue)
    recipe, told = asked.recipe(slurm.faults(asked.job, settings))
    job = asked.job_of(recipe)
    _require(recipe, job, [*told, *contradictions(job, recipe.config)], slurm.added(job, recipe.config))
    return _print(slurm.script(job, recipe.config, settings), recipe, job)


def _kubernetes(args: argparse.Namespace) -> int:
    from hp_core.jobs import kubernetes

    names = ("image", "namespace", "grace", "restarts")
    settings = kubernetes.Settings(
        **{name: getattr(args, name) for name in names}, volumes=tuple(args.volume), env=tuple(args.env)
    )
    asked = _Asked.by(args, args.workdir, resumes=args.restarts > 0)
    recipe, told = asked.recipe(kubernetes.faults(asked.job, settings))
    job = asked.job_of(recipe)
    problems = kubernetes.problems(job, recipe.config, settings)
    _require(recipe, job, [*told, *problems], kubernetes.added(job, recipe.config))
    return _print(kubernetes.manifest(job, recipe.config, settings), recipe, job)


def _torchrun(args: argparse.Namespace) -> int:
    from hp_core.jobs import torchrun

    asked = _Asked.by(args, os.getcwd(), resumes=None)
    recipe, told = asked.recipe(torchrun.faults(args.rdzv_endpoint))
    job = asked.job_of(recipe)
    problems = torchrun.problems(job, recipe.config, args.rdzv_endpoint)
    _require(recipe, job, [*told, *problems], torchrun.added(job, recipe.config))
    return _print(torchrun.command_line(job, recipe.config, args.rdzv_endpoint), recipe, job)


@dataclass(frozen=True)
class _Asked:
    """What the command line says of a job: all of `job` that needs no recipe, and what is wrong with its numbers.

    `nodes`, `nproc` and `gpus` are None where they are not given, or wrong. `resumes` is None where nothing but the
    recipe's `launch.max_restarts` starts the job again.
    """

    job: Job
    nodes: int | None
    nproc: int | None
    gpus: int | None
    resumes: bool | None
    faults: tuple[Problem, ...]

    @classmethod
    def by(cls, args: argparse.Namespace, workdir: str, *, resumes: bool | None) -> _Asked:
        """What `args` ask for."""
        given = {name: vars(args).get(name) for name in ("nodes", "nproc", "gpus", "cpus")}
        found = {name: list(positive(one, f"--{name}", int(name != "gpus"))) for name, one in given.items()}
        nodes, nproc, gpus, cpus = (None if found[name] else one for name, one in given.items())
        job = Job(
            recipe=args.recipe,
            name=args.name or default_name(args.recipe),
            nodes=nodes or 1,
            nproc=nproc or 1,
            workdir=workdir,
            overrides=tuple(args.overrides),
            plugins=tuple(args.plugin),
            cpus=cpus,
            memory=vars(args).get("memory"),
            resumes=bool(resumes),
        )
        return cls(job, nodes, nproc, gpus, resumes, tuple(one for faults in found.values() for one in faults))

    def recipe(self, faults: Iterable[Problem]) -> tuple[Recipe, list[Problem]]:
        """The recipe, and what is wrong with the options, of which `faults` are some.

        Raises:
            InputError: nothing can be said of the job and its recipe together, which is wrong; with all that is.
        """
        from hp_core.config.loader import examine

        told = [*self.faults, *faults]
        # How many processes the recipe has to fit is known only once it is read, which may need what the job adds.
        read = (examine(self.job.recipe, replaced(self.job.overrides, added)).recipe for added in _machines(self.nodes))
        try:
            recipe = next(filter(None, read), None) or checked_recipe(
                self.job.recipe, self.job.overrides, self.job.plugins
            )
        except InputError as error:
            raise InputError([*told, *error.problems]) from error
        return recipe, [*told, *open_number_of_nodes(self.nodes, recipe.config)]

    def job_of(self, recipe: Recipe) -> Job:
        """The job, with what the recipe says where the command line doesn't."""
        config = recipe.config
        nproc = self.nproc or config.launch.nproc
        return replace(
            self.job,
            nodes=number_of_nodes(self.nodes, config),
            nproc=nproc,
            gpus=number_of_gpus(self.gpus, nproc, config),
            resumes=config.launch.max_restarts > 0 if self.resumes is None else self.resumes,
        )


def _machines(nodes: int | None) -> Iterator[dict[str, str]]:
    """What a recipe may lack before a job gives it: a place to meet, and machines that meet there."""
    place = {"launch.rdzv_endpoint": _SAMPLES["launch.rdzv_endpoint"]}
    yield from ({}, place)
    if nodes is not None:
        yield {**place, "launch.nnodes": str(nodes)}


def _require(recipe: Recipe, job: Job, problems: Iterable[Problem], added: Mapping[str, str]) -> None:
    """Refuse what is wrong with the job, and with the recipe as the job will start it."""
    found = list(problems)
    values = {key: _SAMPLES[key] if "$" in value else value for key, value in added.items() if key != "output_dir"}
    kept = replace(job, overrides=tuple(one for one in job.overrides if not one.startswith("--output_dir=")))
    try:
        checked_recipe(job.recipe, kept.overrides_with(values), job.plugins, job.nodes * job.nproc)
    except InputError as error:
        found += error.problems
    if found:
        raise recipe.located(InputError(found))


def _print(text: str, recipe: Recipe, job: Job) -> int:
    print(text, end="")
    if job.resumes and not recipe.config.checkpoint.save_every:
        message = "checkpoint.save_every is 0: a job that is killed, not asked to stop, starts over"
        print(f"note: {message}; add --checkpoint.save_every=N", file=sys.stderr)
    return 0
