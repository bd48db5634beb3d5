"""Operations of a model and of the steps of a run: the same on any layout, and those by hand."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hp_core.config.models import AcceleratorConfig, FsdpConfig
from hp_core.model.flops import Flops, training_flops
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.testing.models import tiny_config
from hp_core.testing.ranks import run_ranks
from hp_core.testing.setups import tiny_setup
from tests.e2e.runs import manifest, recipe, steps, train
from tests.equivalence.layouts import WITH_FAMILIES, beyond
from tests.model.tiny import build
from tests.parallel.test_experts import MOE

LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "fsdp2": (2, {}, {}),
    "replicated": (2, {}, {"dp_replicate_size": 2}),
    "tp2": (2, {"tp_size": 2}, {}),
    "tp2, sequence parallel": (2, {"tp_size": 2, "sequence_parallel": True}, {}),
    "cp2": (2, {"cp_size": 2}, {}),
    "ep2": (2, {"ep_size": 2}, {}),
    "pp2": (2, {"pp_size": 2}, {}),
    "pp2, zero bubble": (2, {"pp_size": 2, "pp_schedule": "zbv_zero_bubble"}, {}),
    "ep2 x tp2": (4, {"ep_size": 2, "tp_size": 2}, {}),
    "pp2 x tp2": (4, {"pp_size": 2, "tp_size": 2}, {}),
}
# What is frozen: nothing, all that a first stage begins with, a layer of the last one, and all but its norm and head.
FROZEN = ((), ("embed_tokens", "layers.0."), ("layers.3.",), ("embed_tokens", "layers."))


def count(environment: ProcessEnvironment, families: list[str], accelerator: Any, fsdp: Any) -> list[Flops]:
    found = []
    with tiny_setup(environment, accelerator=AcceleratorConfig(**accelerator), fsdp=FsdpConfig(**fsdp)) as setup:
        for family in families:
            for parts in FROZEN:
                model = build(setup, {**tiny_config(family), "num_hidden_layers": 4})
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(not any(part in name for part in parts))
                found.append(training_flops(model, setup))
    return found


@cache
def alone(families: tuple[str, ...]) -> list[Flops]:
    return run_ranks(count, 1, list(families), {}, {}, preload=WITH_FAMILIES)[0]


@pytest.mark.parametrize("name", beyond(LAYOUTS, "fsdp2", "tp2", "ep2", "pp2"))
def test_a_model_asks_for_the_same_on_any_layout(name: str) -> None:
    ranks, accelerator, fsdp = LAYOUTS[name]
    # A dense model has no experts to spread, and a tied one no first and last stage in one place.
    families = ("qwen3_moe",) if "ep2" in name or "bubble" in name else ("qwen3_moe", "llama_tied")
    expected = alone(families)
    assert len({one.per_token for one in expected}) == len(expected)
    assert run_ranks(count, ranks, list(families), accelerator, fsdp, preload=WITH_FAMILIES) == [expected] * ranks


# Rows of 15 tokens in documents of 5, which shared sequences are padded behind; the last of five rows is in its step
# with rows that only fill it up.
RUN = (
    MOE[0],
    "--model.config.num_hidden_layers=4",
    "--dataset={_target_: hp_core.testing.parts.numbered_rows, num_rows: 5, length: 15, documents: 3}",
    "--training={train_epochs: 1, global_batch_size: 4, micro_batch_size: 2, seed: 3, device_peak_tflops: 0.5}",
)
PER_TOKEN = 6 * (4 * (2 * 32 * 32 + 2 * 32 * 16 + 2 * 3 * 32 * 16 + 32 * 4) + 32 * 96)
PER_PAIR = 3 * 4 * 4 * 32
A_ROW = 15 * PER_TOKEN + 3 * (1 + 2 + 3 + 4 + 5) * PER_PAIR


def operations(rows: list[dict[str, Any]], ranks: int) -> list[float]:
    seconds = zip(steps(rows, "tflops_per_second"), steps(rows, "step_time_s"), strict=True)
    return [rate * 1e12 * ranks * time for rate, time in seconds]


@pytest.mark.parametrize("name", ["alone", *beyond(LAYOUTS, "fsdp2", "cp2", "pp2")])
def test_the_steps_of_a_run_count_what_is_no_padding(name: str, tmp_path: Path) -> None:
    ranks, accelerator, fsdp = LAYOUTS.get(name, (1, {}, {}))
    keys = [f"--accelerator.{key}={value}" for key, value in accelerator.items()]
    keys += [f"--fsdp_config.{key}={value}" for key, value in fsdp.items()]
    rows = train(recipe(tmp_path), *RUN, *keys, nproc=ranks)
    assert operations(rows, ranks) == pytest.approx([4 * A_ROW, A_ROW], rel=1e-9)
    # Row r has 15 targets but for its first r.
    targets = zip(steps(rows, "tokens_per_second"), steps(rows, "step_time_s"), strict=True)
    assert sum(rate * time for rate, time in targets) == pytest.approx(5 * 15 - (0 + 1 + 2 + 3 + 4))
    assert steps(rows, "mfu") == pytest.approx([2 * rate for rate in steps(rows, "tflops_per_second")])
    assert manifest(tmp_path / "run")["flops"] == {
        "per_token": PER_TOKEN,
        "per_pair": {"document": PER_PAIR},
        "device_peak_tflops": 0.5,
        "peak_is_measured": False,
        "dtype": "float32",
    }


@pytest.mark.parametrize("mode", ["off", "full"])
def test_a_row_counts_the_steps_since_the_last_one(mode: str, tmp_path: Path) -> None:
    """And nothing twice that is computed again."""
    rows = train(recipe(tmp_path), *RUN, "--training.log_every=2", f"--activation_checkpoint.mode={mode}")
    assert [2 * one for one in operations(rows, 1)] == pytest.approx([5 * A_ROW], rel=1e-9)
