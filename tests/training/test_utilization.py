"""What a run says of its operations: relative to a peak that is given or measured once, or why not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_core.observe.trackers import read_metrics
from hp_core.training import utilization
from hp_core.training.accounting import MicroBatch
from hp_core.training.utilization import Utilization
from tests.e2e.runs import hp_train_here, manifest, recipe, steps
from tests.model.replacement.rules import skeleton
from tests.model.tiny import LLAMA


class FakeRun:
    """As much of a run as is asked."""

    def __init__(self, peak: float | None = None, world_size: int = 2, has_last_stage: bool = True) -> None:
        self.said: list[str] = []
        self.recorded: dict[str, Any] = {}
        self.console, self.setup, self.config = self, self, self
        self.training, self.mixed_precision, self.sizes = self, self, self
        self.device_peak_tflops, self.param_dtype, self.pp = peak, None, 1
        self.world_size, self.has_last_stage, self.device = world_size, has_last_stage, torch.device("cpu")

    def say(self, text: str) -> None:
        self.said.append(text)

    def record(self, **facts: Any) -> None:
        self.recorded.update(facts)

    def gather_on_host(self, values: list[float]) -> list[list[float]]:
        return [values, [3 * value for value in values]]


def utilization_of(run: FakeRun, model: Any = None) -> Utilization:
    return Utilization(skeleton(LLAMA) if model is None else model, run)  # type: ignore[arg-type]


def micro_batch(**inputs: Any) -> MicroBatch:
    """Rows of documents of 3 and 1 tokens, and of 2 tokens and padding."""
    labels = torch.zeros(2, 4, dtype=torch.long)
    is_padding = torch.tensor([[False] * 4, [False, False, True, True]])
    positions = torch.tensor([[0, 1, 2, 0], [0, 1, 0, 1]])
    given = {"position_ids": positions, **inputs}
    return MicroBatch.of(
        {name: one for name, one in given.items() if one is not None}, {"labels": labels, "is_padding": is_padding}
    )


def test_tokens_and_pairs_that_are_no_padding_count() -> None:
    run = FakeRun(peak=2.0)
    flops = utilization_of(run).own_flops([micro_batch(), micro_batch()])
    per_token, per_pair = run.recorded["flops"]["per_token"], run.recorded["flops"]["per_pair"]["document"]
    assert flops == 2 * (6 * per_token + (6 + 1 + 3) * per_pair)
    assert utilization_of(FakeRun(has_last_stage=False)).own_flops([micro_batch()]) == 0


def test_rates_are_those_of_a_device() -> None:
    found = utilization_of(FakeRun(peak=2.0)).metrics(8e12, 4.0)
    assert found == {"tflops_per_second": 1.0, "mfu": 0.5}
    assert utilization_of(FakeRun(peak=2.0)).metrics(8e12, 0.0) == {"tflops_per_second": None, "mfu": None}


def test_a_peak_is_measured_once_and_is_the_mean_of_the_ranks(monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(utilization, "measured_peak", lambda *given: calls.append(given) or 0.25)
    run = FakeRun()
    found = utilization_of(run)
    assert found.metrics(8e12, 4.0) == {"tflops_per_second": 1.0, "mfu": None}
    assert run.recorded["flops"]["device_peak_tflops"] is None
    for _ in range(2):
        found.measure_peak()
    assert calls == [(torch.device("cpu"), torch.float32)]
    assert found.metrics(8e12, 4.0) == {"tflops_per_second": 1.0, "mfu": 2.0}
    assert run.said == ["MFU is relative to 0.5 TFLOP/s a device, measured in float32"]
    assert (run.recorded["flops"]["device_peak_tflops"], run.recorded["flops"]["peak_is_measured"]) == (0.5, True)


def test_a_peak_that_is_given_is_not_measured(monkeypatch) -> None:
    monkeypatch.setattr(utilization, "measured_peak", lambda *_: pytest.fail("measured"))
    run = FakeRun(peak=2.0)
    utilization_of(run).measure_peak()
    assert run.said == []


def test_a_model_that_is_not_known_is_told_once_and_has_no_metrics(monkeypatch) -> None:
    monkeypatch.setattr(utilization, "measured_peak", lambda *_: pytest.fail("measured"))
    run = FakeRun()
    found = utilization_of(run, torch.nn.Linear(2, 2))
    assert found.own_flops([micro_batch()]) == 0
    found.measure_peak()
    assert found.metrics(0.0, 4.0) == {}
    assert run.said == ["no MFU: Linear is no model of transformers"]
    assert run.recorded == {}


@pytest.mark.parametrize("positions", [None, torch.zeros(2, 3, dtype=torch.long), torch.zeros(4, 2, 4), "no tensor"])
def test_batches_whose_documents_are_not_known_are_told_once(positions: Any) -> None:
    run = FakeRun(peak=2.0)
    found = utilization_of(run)
    flops = found.own_flops([micro_batch(), micro_batch(position_ids=positions)])
    assert math.isnan(flops)
    for _ in range(2):
        assert found.metrics(flops, 4.0) == {}
    assert run.said == ["no MFU: micro-batches have no position_ids that tell their documents apart"]


def test_a_run_measures_behind_its_first_row_and_skipped_steps_count_nothing(tmp_path: Path) -> None:
    """A run of one step doesn't measure; the third step of four has no targets."""
    path = recipe(tmp_path)
    data = "--dataset={_target_: tests.e2e.parts.numbered_rows, num_rows: 4, silent: [0]}"
    keys = [data, "--training={train_epochs: 1, global_batch_size: 1, seed: 3}", f"--output_dir={tmp_path / 'run'}"]
    done = hp_train_here(str(path), *keys)
    assert done.stdout.count("MFU is relative to ") == 1
    rows = [row for row in read_metrics(tmp_path / "run") if "lr" in row]
    peak = manifest(tmp_path / "run")["flops"]["device_peak_tflops"]
    assert [row["mfu"] for row in rows] == [None, *(pytest.approx(row["tflops_per_second"] / peak) for row in rows[1:])]
    assert {row["tflops_per_second"] == 0 for row in rows if "skipped" in row} == {True}
    assert [row["tokens"] == 0 for row in rows] == [row["tflops_per_second"] == 0 for row in rows]
    assert steps(rows, "tokens").count(0) == 1
    one = hp_train_here(str(path), "--training.train_iters=1", f"--output_dir={tmp_path / 'one'}")
    assert "MFU" not in one.stdout
    assert manifest(tmp_path / "one")["flops"]["device_peak_tflops"] is None
