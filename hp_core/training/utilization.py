"""How much a run computes, and how much of what its devices could do that is (MFU)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from hp_core.model.flops import Flops, UnknownFlopsError, training_flops
from hp_core.observe.peak import measured_peak
from hp_core.parallel.dtypes import DTYPES
from hp_core.training.accounting import MicroBatch
from hp_core.training.run import Run

_NO_POSITIONS = "micro-batches have no position_ids that tell their documents apart"


class Utilization:
    """What the model's products take of each device's peak: that of the recipe, or one that is measured.

    It is told once, and nothing is logged, where it isn't known what a model computes.
    """

    def __init__(self, model: nn.Module, run: Run) -> None:
        self._run = run
        self._flops: Flops | None = None
        self._peak = run.config.training.device_peak_tflops
        self._is_measured = self._peak is None
        self._dtype = _computed_in(model, run)
        try:
            self._flops = training_flops(model, run.setup)
        except UnknownFlopsError as error:
            run.console.say(f"no MFU: {error}")
        else:
            self._record()

    def own_flops(self, micro_batches: Sequence[MicroBatch]) -> float:
        """The operations of a step's forward and backward passes, for this rank's tokens that are no padding.

        Counted on the host. The stages of a pipeline have the same tokens, and the last one counts them for all. Not a
        number where it isn't known where documents begin.
        """
        if self._flops is None or not self._run.setup.has_last_stage:
            return 0.0
        return sum(_flops_of(self._flops, one) for one in micro_batches)

    def metrics(self, flops: float, seconds: float) -> dict[str, float | None]:
        """What a row says of so many operations of all ranks in so many seconds: for each device, 10^12 a second."""
        if self._flops is None:
            return {}
        if math.isnan(flops):
            self._run.console.say(f"no MFU: {_NO_POSITIONS}")
            self._flops = None
            return {}
        rate = flops / seconds / self._run.setup.world_size / 1e12 if seconds else None
        mfu = None if rate is None or self._peak is None else rate / self._peak
        return {"tflops_per_second": rate, "mfu": mfu}

    def measure_peak(self) -> None:
        """Measure what the devices can do, unless that is known. Every rank calls it, between two steps.

        Not before the first step, which would wait for it.
        """
        if self._flops is None or self._peak is not None:
            return
        setup = self._run.setup
        rows = setup.gather_on_host([measured_peak(setup.device, self._dtype)])
        self._peak = sum(peak for (peak,) in rows) / len(rows)
        dtype = str(self._dtype).removeprefix("torch.")
        self._run.console.say(f"MFU is relative to {self._peak:.4g} TFLOP/s a device, measured in {dtype}")
        self._record()

    def _record(self) -> None:
        assert self._flops is not None
        self._run.record(
            flops={
                "per_token": self._flops.per_token,
                "per_pair": {str(window or "document"): number for window, number in self._flops.per_pair.items()},
                "device_peak_tflops": self._peak,
                "peak_is_measured": self._is_measured,
                "dtype": str(self._dtype).removeprefix("torch."),
            }
        )


def _computed_in(model: nn.Module, run: Run) -> torch.dtype:
    asked = run.config.mixed_precision.param_dtype
    return DTYPES[asked] if asked else next((one.dtype for one in model.parameters()), torch.float32)


def _flops_of(flops: Flops, micro_batch: MicroBatch) -> float:
    positions, is_real = micro_batch.model_inputs.get("position_ids"), micro_batch.real_tokens
    if not isinstance(positions, torch.Tensor) or positions.shape != is_real.shape or positions.device.type != "cpu":
        return math.nan
    return flops.of_tokens(positions[is_real])
