"""What the checks of a component say."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from hp_core.testing.checks import BrokenPromiseError, Check


def failures(checks: Iterable[Check], leave_out: Collection[str] = ()) -> dict[str, str]:
    """The messages of the checks that fail, by name."""
    found = {}
    for check in checks:
        if check.name not in leave_out:
            try:
                check()
            except BrokenPromiseError as error:
                found[check.name] = str(error)
    return found
