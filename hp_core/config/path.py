"""Dotted recipe paths: `plan_overrides[0].match`, `dataset."a.b"`."""

from __future__ import annotations

import json
import re
from typing import TypeAlias

Path: TypeAlias = "tuple[str | int, ...]"

# In a pattern of paths, the step that stands for every index of a list.
ITEM = -1

_BARE_KEY = re.compile(r"[^.\[\]=\"\s]+")
_STEP = re.compile(r"""(?:^|\.)(?P<key>[^.\[\]="\s]+)|(?:^|\.)(?P<quoted>"(?:[^"\\]|\\.)*")|\[(?P<index>\d+)\]""")


def format_path(path: Path) -> str:
    """Return the text of a path."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
            continue
        key = step if _BARE_KEY.fullmatch(step) else json.dumps(step, ensure_ascii=False)
        text += f".{key}" if text else key
    return text


def split_path(text: str) -> tuple[Path, str]:
    """Return the path that a text begins with, and what follows it. Raises `ValueError` if it begins with none."""
    path: list[str | int] = []
    position = 0
    while match := _STEP.match(text, position):
        if match["index"] is not None:
            path.append(int(match["index"]))
        elif match["quoted"] is not None:
            path.append(str(json.loads(match["quoted"])))
        else:
            path.append(match["key"])
        position = match.end()
    if not path or isinstance(path[0], int):
        raise ValueError(f"{text!r} doesn't begin with a recipe path")
    return tuple(path), text[position:]


def pattern_of(path: Path) -> Path:
    """Return the pattern that a path fits: the path with `ITEM` in place of each index."""
    return tuple(ITEM if isinstance(step, int) else step for step in path)


def parse_path(text: str) -> Path:
    """Return the path that a text is. Raises `ValueError` if it is something else."""
    path, rest = split_path(text)
    if rest:
        raise ValueError(f"{text!r} is not a recipe path")
    return path
