"""Finding out before anything is built whether a checkpoint is what was written."""

from __future__ import annotations

from hp_core.checkpoint.integrity import problems_of, records_of, shares
from hp_core.checkpoint.layout import FILES, Checkpoint
from hp_core.checkpoint.reading import problem_of_shards
from hp_core.errors import InputError
from hp_core.parallel.agreement import gathered
from hp_core.parallel.setup import DistributedSetup


def problem_with(checkpoint: Checkpoint, setup: DistributedSetup) -> str | None:
    """What is wrong with a checkpoint's files; None when they are as they were written. Every rank calls it.

    The ranks share the files, so each is read once. One without a list of its files can only be looked over.
    """
    found = [problem for problems in gathered(_own_problems(checkpoint, setup), setup) for problem in problems]
    return min(found, default=None)


def remark_on(checkpoint: Checkpoint) -> str | None:
    """What the user should know of a checkpoint that is fine as far as can be told."""
    if checkpoint.is_listed:
        return None
    return f"{checkpoint.path} was written without {FILES}: its files can't be verified"


def _own_problems(checkpoint: Checkpoint, setup: DistributedSetup) -> list[str]:
    try:
        if not checkpoint.is_listed:
            problem = problem_of_shards(checkpoint.path) if setup.environment.is_main else None
            return [problem] if problem else []
        records = records_of(checkpoint)
    except InputError as error:
        return [str(error)]
    return problems_of(checkpoint.path, records, shares(records, setup.world_size)[setup.rank])
