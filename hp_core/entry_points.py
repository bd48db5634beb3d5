"""What installed distributions offer through entry points, read from their metadata alone: nothing is imported."""

from __future__ import annotations

import email
import importlib
import importlib.metadata
import re
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from hp_core.errors import EXIT_USER_INPUT, HpError, InputError, Problem
from hp_core.spelling import did_you_mean

GROUP_PREFIX = "hp."
# The name of a distribution (PEP 508); nothing else is worth telling pip.
NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True, order=True)
class Entry:
    """One named object that an installed distribution offers.

    `value` is the text of the entry point, `package.module:attribute` or `package.module`.
    """

    group: str
    name: str
    value: str
    distribution: str
    version: str

    @property
    def qualified_name(self) -> str:
        """The spelling `package:name`, which no other distribution shares."""
        return f"{self.distribution}:{self.name}"

    @property
    def module(self) -> str:
        """The module that holds the object."""
        return self.value.partition("[")[0].partition(":")[0].strip()

    @property
    def attribute(self) -> str:
        """The dotted attribute path inside the module, empty when the object is the module itself."""
        return self.value.partition("[")[0].partition(":")[2].strip()

    def load(self) -> Any:
        """Import the object. Raises `EntryLoadError`, whatever went wrong on the way."""
        try:
            module = importlib.import_module(self.module)
            return reduce(getattr, filter(None, self.attribute.split(".")), module)
        except (Exception, SystemExit) as cause:
            raise EntryLoadError(self, cause) from cause


class EntryLoadError(HpError):
    """An installed object can't be imported; says which distribution offers it and why it fails."""

    exit_code = EXIT_USER_INPUT

    def __init__(self, entry: Entry, cause: BaseException) -> None:
        # Both arguments go to the base class so that the error survives pickling between processes.
        super().__init__(entry, cause)
        self.entry = entry
        self.cause = cause

    def __str__(self) -> str:
        return (
            f"{self.entry.distribution} {self.entry.version}: entry point '{self.entry.name} = {self.entry.value}' "
            f"of {self.entry.group} can't be loaded: {describe(self.cause)}"
        )

    @property
    def problem(self) -> Problem:
        """The same as one problem without a position."""
        return Problem(str(self), hint="see 'hp-train plugins --load'")


@dataclass(frozen=True)
class Scan:
    """Everything installed under `hp.*` entry-point groups, sorted, and the metadata that couldn't be read."""

    entries: tuple[Entry, ...]
    unreadable: tuple[str, ...]


def scan() -> Scan:
    """Read the entry points of every distribution on `sys.path`.

    A distribution that is found more than once counts once. The order of `sys.path` decides only what it also
    decides for imports: which of two versions of one distribution is meant.
    """
    entries: set[Entry] = set()
    unreadable: set[str] = set()
    for name, offering in _offering_distributions(unreadable).items():
        try:  # one malformed distribution must not hide the others
            # Asked for by name as well: a newer version on the path may have stopped offering anything.
            distribution = _effective(list(importlib.metadata.distributions(name=name)) or offering)
            name, version = _identity(distribution)
            entries.update(
                Entry(point.group, point.name, point.value, name, version)
                for point in distribution.entry_points
                if point.group.startswith(GROUP_PREFIX)
            )
        except Exception as cause:
            unreadable.add(f"{name}: the metadata can't be read: {describe(cause)}")
    return Scan(tuple(sorted(entries)), tuple(sorted(unreadable)))


def spellings(entries: Sequence[Entry]) -> tuple[str, ...]:
    """Return the names of one group's entries as a recipe may write them, sorted.

    A name that several distributions offer appears as `package:name` for each of them.
    """
    count = Counter(entry.name for entry in entries)
    return tuple(sorted({entry.name if count[entry.name] == 1 else entry.qualified_name for entry in entries}))


def choose(entries: Sequence[Entry], name: str, kind: str) -> Entry:
    """Return the entry of one group that a recipe calls `name` or `package:name`.

    `kind` says what is looked for, `loss_fn component`. Raises `InputError`, without a position, when there is
    none or more than one.
    """
    package, _, bare = name.rpartition(":")
    named = [entry for entry in entries if entry.name == bare]
    found = [entry for entry in named if not package or canonical(entry.distribution) == canonical(package)]
    if len(found) == 1:
        return found[0]
    raise InputError(_ambiguous(found, name, kind) if found else _unknown(entries, named, name, kind))


def clash_hint(entries: Sequence[Entry]) -> str:
    """Return how to choose between entries of one name: "write 'acme:focal' or 'zeta:focal'"."""
    return "write " + " or ".join(repr(entry.qualified_name) for entry in entries)


def _ambiguous(found: Sequence[Entry], name: str, kind: str) -> Problem:
    owners = [f"{entry.distribution} {entry.version}" for entry in found]
    if len(set(owners)) == 1:
        values = " and ".join(repr(entry.value) for entry in found)
        return Problem(f"{owners[0]} offers the {kind} {name!r} twice, as {values}")
    return Problem(f"{' and '.join(owners)} each offer a {kind} named {name!r}", hint=clash_hint(found))


def _unknown(entries: Sequence[Entry], elsewhere: Sequence[Entry], name: str, kind: str) -> Problem:
    names = spellings(entries)
    package, _, bare = name.rpartition(":")
    if package and NAME.fullmatch(package):
        own = [entry for entry in entries if canonical(entry.distribution) == canonical(package)]
        if own:
            wanted = did_you_mean(bare, [entry.name for entry in own])
            offered = f"it offers {', '.join(sorted({entry.name for entry in own}))}"
            return Problem(f"the package {package!r} offers no {kind} {bare!r}", hint=f"{wanted} {offered}".strip())
        if installed_version(package) is None:
            others = " or ".join(repr(entry.qualified_name) for entry in elsewhere)
            hint = f"pip install {package}" + (f", or did you mean {others}?" if others else "")
            return Problem(f"no {kind} is named {name!r}: the package {package!r} is not installed", hint=hint)
    same_package = [entry for entry in entries if canonical(entry.distribution) == canonical(name)]
    if elsewhere or same_package:
        guess = f"did you mean {' or '.join(repr(entry.qualified_name) for entry in elsewhere or same_package)}?"
    else:
        guess = did_you_mean(name, names)
    installed = f"installed: {', '.join(names)}" if names else "none is installed"
    return Problem(f"no {kind} is named {name!r}", hint=f"{guess} {installed}".strip())


def installed_version(distribution: str) -> str | None:
    """The version of the distribution of this name, in any of its spellings, or None if it isn't on `sys.path`."""
    try:
        return importlib.metadata.version(distribution)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def canonical(distribution: str) -> str:
    """Return a distribution's name as PEP 503 normalises it, for comparison."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def describe(cause: BaseException) -> str:
    """Return an exception as one line, `ImportError: no module …`."""
    text = " ".join(str(cause).split())
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


def raised_in(cause: BaseException) -> str:
    """Return where an exception was raised, `raised in rows.py, line 7, in __getitem__`."""
    frame = traceback.extract_tb(cause.__traceback__)[-1]
    return f"raised in {Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"


def _offering_distributions(unreadable: set[str]) -> dict[str, list[importlib.metadata.Distribution]]:
    """Return the distributions that may offer something, by canonical name."""
    found: dict[str, list[importlib.metadata.Distribution]] = {}
    for distribution in importlib.metadata.distributions():
        try:
            # Cheaper than parsing METADATA, which most distributions can be spared.
            if GROUP_PREFIX in (distribution.read_text("entry_points.txt") or ""):
                found.setdefault(canonical(_identity(distribution)[0]), []).append(distribution)
        except Exception as cause:
            place = distribution.locate_file("")
            unreadable.add(f"{place}: a distribution's metadata can't be read: {describe(cause)}")
    return found


def _effective(found: list[importlib.metadata.Distribution]) -> importlib.metadata.Distribution:
    """Choose among the metadata of one distribution, given in `sys.path` order."""
    first = found[0].locate_file("")
    together = [one for one in found if one.locate_file("") == first]
    # Two versions in one directory are what an interrupted upgrade leaves; the directory's order is arbitrary.
    chosen = max(together, key=_version_key) if len(together) > 1 else together[0]
    if _is_egg_info(chosen):
        # A source tree's egg-info is as old as its last build; the editable install's own metadata is current.
        same = [one for one in found if not _is_egg_info(one) and _identity(one) == _identity(chosen)]
        return same[0] if same else chosen
    return chosen


def _is_egg_info(distribution: importlib.metadata.Distribution) -> bool:
    return distribution.read_text("METADATA") is None


def _version_key(distribution: importlib.metadata.Distribution) -> tuple[bool, Any]:
    from packaging.version import InvalidVersion, Version

    text = _identity(distribution)[1]
    try:
        return True, Version(text)
    except InvalidVersion:
        return False, text


def _identity(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    """Return the name and version. Raises `ValueError` for a distribution without a name."""
    # Not `distribution.metadata`: where the package importlib_metadata takes the place of python's own, as soon as
    # something imports it, that raises for whatever is missing.
    texts = (distribution.read_text(name) for name in ("METADATA", "PKG-INFO", ""))
    metadata = email.message_from_string(next((text for text in texts if text is not None), ""))
    name, version = metadata["Name"], metadata["Version"]
    if not name:
        raise ValueError("the metadata has no name")
    return name, version or "unknown"
