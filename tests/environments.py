"""Python environments for packages that a test installs, without a second copy of torch and the others."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

_LAUNCHER = """\
#!{python}
import sys

from hp_core.cli.main import main

sys.exit(main())
"""


class Environment:
    """An environment in `directory` that sees what is installed in the one of the tests, and installs on top of it."""

    def __init__(self, directory: Path) -> None:
        venv.create(directory, symlinks=True)
        self.python = directory / "bin" / "python"
        (site,) = directory.glob("lib/python*/site-packages")
        outer = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        # A path alone would do for wheels; addsitedir also reads what editable installs leave.
        calls = "; ".join(f"site.addsitedir({path!r})" for path in outer)
        (site / "outer.pth").write_text(f"import site; {calls}\n")
        self._hp_train = directory / "bin" / "hp-train"
        self._hp_train.write_text(_LAUNCHER.format(python=self.python))
        self._hp_train.chmod(0o755)

    def run(self, command: str, cwd: Path, *extra: str, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        """Run a command line as in a shell where the environment is active; `pip` gets by without a package index."""
        program, *arguments = shlex.split(command)
        words = {
            "pip": [str(self.python), "-m", "pip"],
            "python": [str(self.python)],
            "hp-train": [str(self._hp_train)],
        }[program]
        if program == "pip":
            # The backend is here already, and so is everything that a package requires.
            extra = ("--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check", *extra)
        return subprocess.run(
            [*words, *arguments, *extra],
            cwd=cwd,
            env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_CONSTRAINT")},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def succeed(self, command: str, cwd: Path, *extra: str) -> str:
        """Run a command that must end with 0, and return what it printed."""
        done = self.run(command, cwd, *extra)
        assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        return done.stdout


def shell_commands(readme: Path) -> Iterator[str]:
    """The commands of a README's `sh` blocks, without their comments."""
    for block in re.findall(r"^```sh\n(.*?)^```$", readme.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            command = line.partition(" # ")[0].strip()
            if command:
                yield command
