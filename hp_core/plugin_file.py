"""One-file plugins: a Python file next to the recipe, loaded as a module without touching `sys.path`."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

from hp_core.entry_points import describe
from hp_core.errors import InputError, Problem
from hp_core.spelling import did_you_mean


def is_path(name: str) -> bool:
    """Whether a recipe means a file by `name`, and not an installed plugin."""
    return name.endswith(".py") or "/" in name or os.sep in name


def find_file(name: str, base_dir: Path) -> Path:
    """Return the file that `name` means, relative to `base_dir`. Raises `InputError` when there is none."""
    path = (base_dir / Path(name).expanduser()).resolve()
    if path.suffix != ".py":
        raise InputError(Problem(f"a one-file plugin is a .py file, and {name!r} isn't one"))
    if not path.is_file():
        siblings = [one.name for one in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise InputError(Problem(f"there is no file {str(path)!r}", hint=did_you_mean(path.name, siblings)))
    return path


def load_file(path: Path) -> tuple[ModuleType, str]:
    """Run a one-file plugin and return its module and the SHA-256 of what was run.

    Raises `InputError` with the cause and the line when it fails.
    """
    source = path.read_bytes()
    digest = hashlib.sha256(source).hexdigest()
    place = hashlib.sha256(os.fsencode(path)).hexdigest()
    name = f"hp_plugin_file_{re.sub(r'[^0-9a-zA-Z_]', '_', path.stem)}_{place[:8]}{digest[:8]}"
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        # Compiled from the bytes that were hashed, never from a cached .pyc.
        exec(loader.source_to_code(source, str(path)), module.__dict__)
    except (Exception, SystemExit) as cause:
        del sys.modules[name]
        line = _line(cause, path)
        position = f"{path}:{line}" if line else str(path)
        raise InputError(Problem(f"{position} can't be loaded: {describe(cause)}")) from cause
    return module, digest


def _line(cause: BaseException, path: Path) -> int | None:
    """Return the last line of the file itself that took part in the failure."""
    if isinstance(cause, SyntaxError) and cause.filename == str(path):
        return cause.lineno
    line = None
    trace = cause.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
