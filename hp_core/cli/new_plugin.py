"""`hp-train new-plugin`: write a small package that offers a component or a plugin, with tests that pass at once."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hp_core.errors import EXIT_DONE, InputError, Problem


@dataclass(frozen=True)
class Kind:
    """What a package may offer.

    `group` is its entry-point group, `section` the part of a recipe that names it, `target` the object that the
    entry point names, inside the package, and `summary` what the example in the package does.
    """

    group: str
    section: str
    target: str
    summary: str


KINDS = {
    "loss": Kind("hp.losses", "loss_fn", "loss:ConfidencePenalty", "Cross entropy with a penalty on confidence"),
    "optimizer": Kind(
        "hp.optimizers", "optimizer", "optimizer:sign_descent", "Descent by the sign of the mean gradient"
    ),
    "replacement": Kind(
        "hp.module_replacements",
        "plan_overrides.replace_module",
        "mlp:lean_mlp",
        "A gated MLP that keeps less for the backward pass",
    ),
    "trainer": Kind("hp.trainers", "trainer", "trainer:MinContextTrainer", "Training on targets with enough context"),
    "hooks": Kind("hp.plugins", "plugins", "plugin:loss_watch", "A watch for jumps of the loss"),
}

TEMPLATES = Path(__file__).parents[1] / "templates"
_SUFFIX = ".tmpl"
# The import name stands in import lines and in recipes, which stay readable, and within line limits, at this length.
_LONGEST = 40
# Folders that lie beside the package in its own directory.
_TAKEN_FOLDERS = frozenset({"tests", "build", "dist", "docs"})

_EPILOG = """\
The package works as it is: its component does something, its tests check it with hp_core.testing, and its recipe
trains a tiny model with it. Change it into what you need.

  hp-train new-plugin acme-loss --kind loss
  pip install -e './acme-loss[test]'
  python -m pytest acme-loss
  hp-train acme-loss/recipe.yaml
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `hp-train`."""
    parser = subparsers.add_parser(
        "new-plugin",
        help="write a package with a component or plugin of your own, and its tests",
        description="Write an installable package that offers one component or plugin, with tests and a recipe.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="the package's name for pip, such as acme-loss")
    parser.add_argument(
        "--kind", required=True, choices=KINDS, help="what it offers; hooks change or watch what the trainer does"
    )
    parser.add_argument("--to", metavar="DIR", help="the directory to make for it (default: NAME)")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Check the name and the directory, write the package and say what to do with it."""
    directory = Path(args.name if args.to is None else args.to)
    kind = KINDS[args.kind]
    problems = [*_problems_of_name(args.name, kind), *_problems_of_directory(directory, args.name)]
    if problems:
        raise InputError(problems)
    files = dict(_render(args.name, args.kind))
    _write(directory, files)
    print(_report(args.name, args.kind, directory, sorted(files)))
    return EXIT_DONE


def import_name(name: str) -> str:
    """Return the name under which Python imports the package that pip calls `name`."""
    return re.sub(r"[-_.]+", "_", name).lower()


def _problems_of_name(name: str, kind: Kind) -> Iterator[Problem]:
    """Everything that speaks against a name; later problems only where the name can be used at all."""
    from hp_core.entry_points import NAME, installed_version, scan

    if not NAME.fullmatch(name):
        message = (
            f"{name!r} is no name for a package: letters, digits, '-', '_' and '.', with a letter or digit at both ends"
        )
        close = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-_.")
        yield Problem(message, hint=f"try {close!r}" if NAME.fullmatch(close) else "try 'acme-loss'")
        return
    package = import_name(name)
    other = f"try 'hp-{name}'"
    if len(package) > _LONGEST:
        yield Problem(f"{name!r} is longer than {_LONGEST} characters")
        return
    if not package.isidentifier() or keyword.iskeyword(package):
        what = "a keyword of Python" if keyword.iskeyword(package) else "not an identifier"
        yield Problem(f"{name!r} would be imported as {package!r}, which is {what}", hint=other)
        return
    if package in sys.stdlib_module_names:
        yield Problem(f"{name!r} would hide the module {package!r} of the standard library", hint=other)
    elif package in _TAKEN_FOLDERS:
        yield Problem(
            f"{name!r} would be imported as {package!r}, a folder that a package keeps other things in", hint=other
        )
    version = installed_version(name)
    if version is not None:
        yield Problem(f"a package {name!r} is installed already, version {version}", hint=other)
    elif package not in sys.stdlib_module_names and _is_importable(package):
        yield Problem(f"a module {package!r} can be imported already, and one would hide the other", hint=other)
    for entry in scan().entries:
        if entry.group == kind.group and entry.name == package:
            owner = f"{entry.distribution} {entry.version}"
            what = "plugin" if kind.section == "plugins" else f"{kind.section} component"
            yield Problem(f"{owner} offers the {what} {package!r} already", hint=other)


def _is_importable(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    # Any folder is importable as a namespace, and gives way to a package.
    return spec is not None and spec.origin is not None


def _problems_of_directory(directory: Path, name: str) -> Iterator[Problem]:
    if directory.is_dir():
        if any(directory.iterdir()):
            inside = shlex.quote(str(directory / name))
            yield Problem(f"the directory {str(directory)!r} is not empty", hint=f"write --to {inside}")
    elif directory.exists() or directory.is_symlink():
        yield Problem(f"{str(directory)!r} exists and is no directory", hint="name another with --to")


def _render(name: str, kind_name: str) -> Iterator[tuple[str, str]]:
    """Give the text of each file by its path in the package's directory."""
    from string import Template

    from hp_core.entry_points import installed_version

    kind = KINDS[kind_name]
    values = {
        "name": name,
        "package": import_name(name),
        "group": kind.group,
        "section": kind.section,
        "target": kind.target,
        "summary": kind.summary,
        "version": ".".join((installed_version("hyperparallel") or "0").split(".")[:2]),
    }
    for folder in (TEMPLATES / "common", TEMPLATES / kind_name):
        for path in sorted(folder.rglob(f"*{_SUFFIX}")):
            parts = path.relative_to(folder).with_suffix("").parts
            place = "/".join(values["package"] if part == "package" else part for part in parts)
            yield place, Template(path.read_text(encoding="utf-8")).substitute(values)


def _write(directory: Path, files: dict[str, str]) -> None:
    try:
        for place, text in files.items():
            path = directory / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(
            Problem(f"{str(directory)!r} can't be written: {reason}", hint="name another with --to")
        ) from error


def _report(name: str, kind_name: str, directory: Path, places: list[str]) -> str:
    # pip takes a relative path for one only with a separator in it.
    shown = str(directory) if directory.is_absolute() else os.path.join(os.curdir, directory)
    return "\n".join(
        [
            f"{name}: a package with one entry point of {KINDS[kind_name].group}, in {directory}",
            *(f"  {place}" for place in places),
            "next:",
            f"  pip install -e {shlex.quote(f'{shown}[test]')}",
            f"  python -m pytest {shlex.quote(shown)}",
            f"  hp-train {shlex.quote(os.path.join(shown, 'recipe.yaml'))}",
        ]
    )
