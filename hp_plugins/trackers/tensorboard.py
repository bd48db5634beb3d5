"""TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from hp_core.errors import ArgumentError


class TensorBoardTracker:
    """Writes every number of a row as a scalar, under `tensorboard/` of the run directory."""

    def __init__(
        self,
        directory: Annotated[str, Field(description="Folder inside the run directory.")] = "tensorboard",
        *,
        run_dir: Path,
        first_step: int = 1,
    ) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ArgumentError(
                "name", "tensorboard is not installed", "pip install 'hyperparallel[tensorboard]'"
            ) from error
        # What an earlier attempt wrote from this step on is taken back.
        self._writer = SummaryWriter(str(run_dir / directory), purge_step=first_step)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Write the row's numbers at its step."""
        for name, value in metrics.items():
            if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, metrics["step"])
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
