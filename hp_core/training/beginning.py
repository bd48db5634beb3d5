"""Where a run writes and what it goes on from: chosen first of all, and looked at again once the directory is held."""

from __future__ import annotations

import dataclasses
import os
import socket
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from hp_core.checkpoint.layout import Checkpoint, named
from hp_core.checkpoint.verify import problem_with, remark_on
from hp_core.errors import RunError
from hp_core.observe.run_directory import RunDirectory, choose, release, require_apart
from hp_core.parallel.agreement import gathered
from hp_core.parallel.setup import DistributedSetup
from hp_core.training.run import on_main


@dataclass
class Beginning:
    """How a recipe's run begins.

    `resume` is what the recipe says. `kept` is the directory of an earlier attempt of this launch, which is gone on in
    whatever the recipe says. `broken` are the checkpoints that `directory` has found to be, and what is wrong with
    them; it grows with each.
    """

    recipe: Path
    output_dir: str | None
    resume: str | None
    overwrite: bool
    kept: str | None
    now: datetime = field(default_factory=datetime.now)
    broken: dict[Path, str] = field(default_factory=dict, init=False)

    def directory(self, setup: DistributedSetup) -> RunDirectory:
        """Where the run writes, and the newest intact checkpoint that it goes on from. Every rank calls it."""
        while True:
            # The main rank decides for all: clocks differ, and choosing may make a directory.
            directory = on_main(self._pick, setup)
            if directory.checkpoint is None:
                return directory
            problem = problem_with(directory.checkpoint, setup)
            if problem is None:
                remark = remark_on(directory.checkpoint)
                return dataclasses.replace(directory, messages=(*directory.messages, *([remark] if remark else [])))
            self.broken[directory.checkpoint.path] = problem
            if setup.environment.is_main:
                release(directory)

    def require_unchanged(self, directory: RunDirectory) -> None:
        """Refuse a directory in which another run has worked since it was chosen; called when no other can any more.

        Raises:
            HpError: what the run has read is not what it would go on from now.
        """
        if self.overwrite:
            return
        resume = self.resume if self.kept is None else "latest"
        own = _own(directory)
        if self.kept is None and own != directory.checkpoint:
            # One of another run, which may have gone on meanwhile, or have deleted it.
            resume = None
        again = self._choice(str(directory.path), resume)
        if (again.continues, _own(again)) != (directory.continues, own):
            newest = f"; the newest checkpoint is now {again.checkpoint.path}" if again.checkpoint else ""
            raise RunError(f"another run has written to '{directory.path}' since this one began{newest}; start again")

    def _pick(self) -> RunDirectory:
        if self.kept is None:
            require_apart(self.recipe, self.output_dir, self.resume, overwrite=self.overwrite)
            return self._choice(self.output_dir, self.resume)
        directory = self._choice(self.kept, "latest")
        if directory.checkpoint is None and self.resume not in (None, "latest"):
            # Nothing is saved yet: from where the first attempt set out.
            newest = named(Path(self.resume), self.broken).newest
            return dataclasses.replace(directory, checkpoint=newest, messages=())
        return directory

    def _choice(self, output_dir: str | None, resume: str | None) -> RunDirectory:
        return choose(
            recipe=self.recipe,
            output_dir=output_dir,
            resume=resume,
            overwrite=self.overwrite,
            now=self.now,
            broken=self.broken,
        )


def unheeded(output_dir: str | None, directory: RunDirectory, setup: DistributedSetup) -> str | None:
    """What to tell of ranks that are given another directory than the main one, which decides. Every rank calls it."""
    given = None if output_dir is None else os.path.abspath(output_dir)
    by_rank = gathered((output_dir, given, socket.gethostname()), setup)
    # The same relative path is meant to be the same, from wherever the machines start.
    others = [(rank, *one) for rank, one in enumerate(by_rank) if one[0] not in (None, by_rank[0][0])]
    unlike = [(rank, said, host) for rank, said, whole, host in others if whole != by_rank[0][1]]
    if not unlike:
        return None
    rank, said, host = unlike[0]
    own = f"all write to {str(directory.path)!r}, the directory of rank 0 (on {by_rank[0][2]})"
    return f"output_dir: rank {rank} (on {host}) is given {said!r}, which is not heeded: {own}"


def _own(directory: RunDirectory) -> Checkpoint | None:
    """The checkpoint, if it lies in the directory itself."""
    one = directory.checkpoint
    return one if one is not None and directory.path.resolve() in one.path.resolve().parents else None
