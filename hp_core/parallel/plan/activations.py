"""What becomes of the activations of a model between its forward and its backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Activations:
    """The FQNs of the modules that are computed again, and by which `mode`, and of those that are kept on the host.

    They are those of the whole model: a pipeline rank has some of them.
    """

    mode: str = "off"
    recomputed: tuple[str, ...] = ()
    swapped: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The same for `plan.json`."""
        return {name: list(value) if name != "mode" else value for name, value in asdict(self).items()}

    def lines(self) -> Iterator[str]:
        """Yield in words how many modules there are of each."""
        if self.recomputed:
            yield f"activations: {_modules(self.recomputed)} computed again ({self.mode})"
        if self.swapped:
            yield f"activations: {_modules(self.swapped)} kept on the host"


NOTHING_SPARED = Activations()


def _modules(names: tuple[str, ...]) -> str:
    return f"those of {len(names)} modules are" if len(names) > 1 else f"those of {names[0]} are"
