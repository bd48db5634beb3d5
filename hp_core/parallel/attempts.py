"""What a run that its launcher starts over knows of the attempts before."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

# By this name the attempts of a run know its directory.
RUN_DIRECTORY = "run_directory"


def of_run(run_id: str, store: dist.Store) -> dist.Store:
    """What belongs to one run in a store that several may share, where machines meet."""
    return dist.PrefixStore(f"run_{run_id}", store)


@dataclass(frozen=True)
class Attempts:
    """Words that outlive the ranks that say them: they are kept by the launcher, for the attempts that follow.

    `number` is 0 for the first attempt.
    """

    number: int = 0
    store: dist.Store | None = None

    def remember(self, name: str, value: str) -> None:
        """Keep a word."""
        if self.store is not None:
            self.store.set(f"attempts/{name}", value)

    def recall(self, name: str) -> str | None:
        """A word that an earlier attempt has kept; None if there is none."""
        if self.number == 0 or self.store is None or not self.store.check([f"attempts/{name}"]):
            return None
        return self.store.get(f"attempts/{name}").decode()
