"""The nearest valid spelling of a mistyped word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the choice most like `word`, or None when none is alike.

    Case and `-` against `_` don't count as differences. The answer doesn't depend on the order of `choices`.
    `cutoff` is the least `difflib` ratio (0 to 1) that counts as alike.
    """
    folded: dict[str, str] = {}
    for choice in sorted(choices):
        folded.setdefault(_fold(choice), choice)
    matches = difflib.get_close_matches(_fold(word), list(folded), n=1, cutoff=cutoff)
    return folded[matches[0]] if matches else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return the hint "did you mean 'x'?" for the nearest choice, or an empty text."""
    choice = nearest(word, choices)
    return f"did you mean {choice!r}?" if choice is not None else ""


def _fold(word: str) -> str:
    return word.casefold().replace("-", "_")
