"""Components that only tests use: numbered rows with gaps in their labels, and losses that break on purpose."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hp_core.data.protocols import Datasets
from hp_core.errors import InputError
from hp_core.testing.parts import NumberedRows


def numbered_rows(
    num_rows: int = 24,
    length: int = 16,
    vocab: int = 96,
    silent: list[int] | None = None,
    validation_rows: int = 0,
    validation_silent: list[int] | None = None,
    test_rows: int = 0,
) -> Datasets:
    test = NumberedRows(test_rows, length, vocab, set()) if test_rows else None
    validation = NumberedRows(validation_rows, length, vocab, set(validation_silent or [])) if validation_rows else None
    return Datasets(NumberedRows(num_rows, length, vocab, set(silent or [])), validation, test)


class FaultyLoss(nn.Module):
    """A mean loss that is `value` the `call`-th time that `rank` calls it."""

    def __init__(self, rank: int, call: int, value: str = "nan", times: int = 1) -> None:
        super().__init__()
        self.rank, self.calls = rank, range(call, call + times)
        self.value = float(value)
        self.count = 0

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if dist.get_rank() == self.rank and self.count in self.calls:
            return model_output.loss * self.value
        return model_output.loss


class TwoPartLoss(nn.Module):
    """A dict of two sums, the second a tenth of the first."""

    reduction = "sum"

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = nn.functional.cross_entropy(model_output.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"main_loss": loss, "tenth_loss": loss / 10}


class RaisingLoss(nn.Module):
    """Raises on one rank at its `call`-th call."""

    def __init__(self, rank: int = 1, call: int = 2) -> None:
        super().__init__()
        self.rank, self.call, self.count = rank, call, 0

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if dist.get_rank() == self.rank and self.count == self.call:
            raise RuntimeError("the loss broke")
        return model_output.loss


class WeighingLoss(nn.Module):
    """A loss with a parameter of its own, which nothing would train."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        return model_output.loss * self.weight


def stray_optimizer(lr: float, *, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with a tensor that is not the model's."""
    return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=lr)


def broken_tracker(run_dir: Any) -> Any:
    """A tracker that can't be built."""
    from hp_core import ArgumentError

    raise ArgumentError("_target_", "this tracker is not installed")


class OddLoss(nn.Module):
    """A loss with arguments of other names."""

    def forward(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return outputs.loss


class ZeroLoss(nn.Module):
    """A mean loss that is zero, and so is every gradient."""

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        return model_output.loss * 0.0


class RememberingLoss(nn.Module):
    """The model's own loss, scaled by what it has been so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.5).add_(0.5 * model_output.loss.detach())
        return model_output.loss * self.mean


class CountingLoss(nn.Module):
    """The model's own loss and a hundredth for each call, whatever mode it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return model_output.loss + 0.01 * self.calls


class BrokenLoss(nn.Module):
    """Breaks in one of several places."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self._break("init")

    def bind_model(self, model: nn.Module, distributed_setup: Any) -> None:
        self._break("bind")

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        self._break("forward")
        return model_output.loss

    def _break(self, here: str) -> None:
        if self.where == here:
            raise KeyError(f"no\nway in {here}")


class DeadlyLoss(nn.Module):
    """The model's own loss; kills its process at the `call`-th call on one rank, as an out-of-memory killer would."""

    def __init__(self, rank: int, call: int) -> None:
        super().__init__()
        self.rank, self.call, self.count = rank, call, 0

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if dist.get_rank() == self.rank and self.count == self.call:
            os.kill(os.getpid(), signal.SIGKILL)
        return model_output.loss


class FailingLoss(nn.Module):
    """The model's own loss; on one rank, and in the first attempt alone, it fails at its `call`-th call in some way."""

    def __init__(self, rank: int, call: int, how: str, attempts: int = 1) -> None:
        super().__init__()
        self.rank, self.call, self.how, self.attempts = rank, call, how, attempts
        self.count = 0

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        self.count += 1
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if dist.get_rank() == self.rank and self.count == self.call and attempt < self.attempts:
            fail(self.how)
        return model_output.loss


class GatedLoss(nn.Module):
    """The model's own loss; in the first attempt, its `call`-th call waits for a file, or for the end of all."""

    def __init__(self, call: int, gate: str) -> None:
        super().__init__()
        self.call, self.gate, self.count = call, Path(gate), 0

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        self.count += 1
        is_first = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0
        while is_first and self.count == self.call and not self.gate.exists():
            time.sleep(0.05)
        return model_output.loss


def fail(how: str) -> None:
    """End, or don't."""
    if how == "raise":
        raise RuntimeError("the loss broke")
    if how == "refuse":
        raise InputError("the loss refuses")
    if how == "hang":
        print("hanging", flush=True)
        time.sleep(600)
    if how.startswith("exit"):
        os._exit(int(how.removeprefix("exit")))
    os.kill(os.getpid(), getattr(signal, how))


def slow_rows() -> Datasets:
    time.sleep(60)
    return numbered_rows()


def rows_of_two_runs(source: str, copy: str) -> Datasets:
    """Rows that are built while another run, which began with this one, writes to the same directory and ends."""
    shutil.copytree(source, copy)
    return numbered_rows()


class BreakingRows(NumberedRows):
    """Raises at every row from a certain one on, on one rank, which gets 12 of the 24."""

    def __init__(self, rank: int, start: int) -> None:
        super().__init__(24, 16, 96, set())
        self.rank, self.start = rank, start

    def __getitem__(self, index: int) -> Any:
        if index >= self.start and os.environ["RANK"] == str(self.rank):
            raise RuntimeError(f"the data broke at row {index}")
        return super().__getitem__(index)


def rows_that_break(rank: int, start: int) -> Datasets:
    return Datasets(BreakingRows(rank, start))


class BreakingTracker:
    """Takes no row of step 2, and keeps the others, and how it ended, in a file."""

    def __init__(self, run_dir: Path, recipe: Any) -> None:
        self.path = run_dir / "kept.jsonl"
        self.keep({"recipe": recipe})

    def keep(self, what: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def log(self, metrics: Any) -> None:
        if metrics["step"] == 2:
            raise RuntimeError("the log broke")
        self.keep(metrics)

    def fail(self) -> None:
        self.keep("failed")

    def close(self) -> None:
        self.keep("closed")


class UnclosableTracker:
    """Can't be closed."""

    def __init__(self, run_dir: Any, config: Any, first_step: int) -> None:
        pass

    def log(self, metrics: Any) -> None:
        pass

    def close(self) -> None:
        raise OSError("no room for the log")


class RootLoss(nn.Module):
    """A loss that is finite, and whose gradient, 0 times that of a root at 0, is NaN from the `call`-th call on."""

    def __init__(self, call: int = 3) -> None:
        super().__init__()
        self.call, self.count = call, 0

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        self.count += 1
        factor = 0.0 if self.count >= self.call else 1.0
        return model_output.loss + (model_output.logits.square().sum() * factor).sqrt() * 1e-6
