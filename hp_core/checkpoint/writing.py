"""Writing one checkpoint: each rank its part, then the lists of everything, then the final name."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.planner import SavePlanner as AnySavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hp_core.checkpoint.integrity import FileRecord, HashingFile, listed, write_file
from hp_core.checkpoint.layout import FILES, FORMAT, MANIFEST, METADATA, TRAINER_STATE, put_in_place
from hp_core.checkpoint.places import Place
from hp_core.checkpoint.retention import prune
from hp_core.checkpoint.snapshot import SavePlanner
from hp_core.config.checkpoint import CheckpointConfig
from hp_core.errors import RunError


@dataclass(frozen=True)
class RankFacts:
    """What the main rank has to know of each: its place, and the optimizer state of the parameters that it has."""

    place: Place
    optimizer_scalars: dict[str, dict[str, Any]]
    optimizer_state: dict[str, list[str]]


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint before it is written; nothing of it changes any more.

    `rank_state` is a rank's own file: random numbers, and what its loss and plugins remember.
    """

    final: Path
    planner: SavePlanner
    rank: int
    rank_state: bytes
    facts: RankFacts
    trainer_state: dict[str, Any]
    manifest: dict[str, Any]


def rank_file(rank: int) -> str:
    """The name of a rank's own file."""
    return f"rank_{rank:05d}.pt"


def write(
    snapshot: Snapshot, settings: CheckpointConfig, group: dist.ProcessGroup, *, is_copied: bool = False
) -> list[str]:
    """Write a checkpoint, and delete what it takes the place of. Every rank of `group` calls it.

    Everything is written beside the final name and renamed when all ranks are done, so a directory with the final
    name is complete.

    Returns:
        What could not be deleted, on the main rank.

    Raises:
        RunError: it could not be written; what was there before is untouched.
    """
    writer = _Writer(snapshot, settings)
    if is_copied:
        # torch would copy what comes from an accelerator ahead of writing it, on a stream of this thread's device.
        writer.per_thread_copy_ahead = 0
    try:
        dcp.save({}, storage_writer=writer, planner=snapshot.planner, process_group=group)
    except (CheckpointException, OSError, RuntimeError) as error:
        if snapshot.rank == 0:
            shutil.rmtree(writer.directory, ignore_errors=True)
        raise RunError(f"can't write checkpoint {snapshot.final}: {cause_of(error)}") from error
    return writer.problems


def cause_of(error: BaseException) -> str:
    """The first failing rank's error in one line."""
    # DCP's own text is the failures of every rank with their tracebacks.
    failures = error.failures if isinstance(error, CheckpointException) else {}
    if not failures:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    rank = min(failures)
    others = f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
    return f"rank {rank}: {cause_of(failures[rank][0])}{others}"


@dataclass(frozen=True)
class _Report:
    """What a rank tells the main one when it has written its part."""

    rank: int
    facts: RankFacts
    files: dict[str, FileRecord]


class _HashingFiles(FileSystem):
    """Files that are hashed while they are written."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """Open a file to write it."""
        with Path(path).open("wb") as raw:
            file = HashingFile(raw)
            try:
                yield cast(io.IOBase, file)
            except RuntimeError as error:
                raise file.failure or error from error
        self.records[Path(path).name] = file.record


class _Writer(dcp.FileSystemWriter):
    """torch's writer, which brings everything else of a checkpoint along with its own messages between ranks.

    A rank's failure at any point becomes known to all, and a save has no collective besides those of torch.
    """

    def __init__(self, snapshot: Snapshot, settings: CheckpointConfig) -> None:
        self.directory = snapshot.final.with_name(snapshot.final.name + ".tmp")
        super().__init__(self.directory)
        self.problems: list[str] = []
        self._snapshot = snapshot
        self._settings = settings
        self.fs = self._files = _HashingFiles()

    def storage_meta(self) -> StorageMeta:
        """Who wrote it; torch would add the path, which is another when a checkpoint is copied."""
        return StorageMeta(save_id=self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the directory to the main rank: there may be a stale one."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make an empty directory. The main rank does, before any rank writes."""
        if self.directory.exists():
            shutil.rmtree(self.directory)
        self.directory.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: AnySavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors and its own file, and report them."""
        results: list[Any] = list(super().write_data(plan, planner).value())
        snapshot, files = self._snapshot, self._files.records
        name = rank_file(snapshot.rank)
        files[name] = write_file(self.directory / name, snapshot.rank_state)
        results.append(_Report(snapshot.rank, snapshot.facts, dict(files)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write what tells of the whole, and give the directory its final name. The main rank does."""
        reports = [one for by_rank in results for one in by_rank if isinstance(one, _Report)]
        written = [[one for one in by_rank if not isinstance(one, _Report)] for by_rank in results]
        super().finish(metadata, written)
        files = {name: record for one in reports for name, record in one.files.items()}
        files[METADATA] = self._files.records[f"{METADATA}.tmp"]
        state = {"format": FORMAT, **self._snapshot.trainer_state, **_of_all_ranks(reports)}
        for name, value in ((TRAINER_STATE, state), (MANIFEST, self._snapshot.manifest)):
            files[name] = write_file(self.directory / name, json.dumps(value, indent=2).encode())
        write_file(self.directory / FILES, listed(files))
        self._put_in_place()

    def _put_in_place(self) -> None:
        final = self._snapshot.final
        _sync(self.directory)
        put_in_place(self.directory, final)
        _sync(final.parent)
        self.problems = prune(final.parent.parent, self._settings)


def _of_all_ranks(reports: list[_Report]) -> dict[str, Any]:
    """What the ranks have reported, as JSON. Each rank of a pipeline has some parameters."""
    reports = sorted(reports, key=lambda one: one.rank)
    return {
        "places": [asdict(one.facts.place) for one in reports],
        "optimizer_scalars": _merged(one.facts.optimizer_scalars for one in reports),
        "optimizer_state": _merged(one.facts.optimizer_state for one in reports),
    }


def _merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def _sync(directory: Path) -> None:
    """Have the names in a directory on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
