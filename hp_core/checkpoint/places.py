"""Which rank goes on with what was saved by which, when a run resumes on other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hp_core.parallel.setup import DistributedSetup


@dataclass(frozen=True)
class Place:
    """What a rank does, whatever its number: its pipeline stage, its tokens, its part of tensors.

    `has_loss` says that it computes the loss: its stage is the last.
    """

    stage: int
    tokens: int
    tensor: int
    has_loss: bool

    @classmethod
    def of(cls, setup: DistributedSetup) -> Place:
        """This rank's."""
        return cls(setup.axis_rank("pp"), setup.token_rank, setup.axis_rank("tp"), setup.has_last_stage)


def same_stream(place: Place, saved: Sequence[Place]) -> int | None:
    """The rank whose random numbers are those of `place`: of the same stage and tokens; None for a place that is new.

    Tensor ranks draw alike, so any of them will do, and the one with the same part is best.
    """
    found = [rank for rank, one in enumerate(saved) if (one.stage, one.tokens) == (place.stage, place.tokens)]
    return min(found, key=lambda rank: saved[rank].tensor != place.tensor, default=None)


def nearest(place: Place, saved: Sequence[Place]) -> int:
    """The rank whose memory of what it has seen suits `place` best; of those that suit alike, the first.

    What counts most is whether it computes the loss, then its tokens, its stage and its part of tensors.
    """

    def distance(rank: int) -> tuple[bool, ...]:
        one = saved[rank]
        pairs = [(one.has_loss, place.has_loss), (one.tokens, place.tokens), (one.stage, place.stage)]
        return tuple(a != b for a, b in [*pairs, (one.tensor, place.tensor)])

    return min(range(len(saved)), key=distance)
