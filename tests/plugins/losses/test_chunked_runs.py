"""Whole runs: the chunked loss logs, clips and evaluates what the dense loss does, on any layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import recipe, steps, train

LAYOUTS = [(1, ["--training.micro_batch_size=2"]), (2, ["--evaluation.every=1"])]


@pytest.mark.parametrize("model_type", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_a_run_with_chunks_is_the_run_without(tmp_path: Path, model_type: str) -> None:
    path = recipe(tmp_path, model_type)
    common = ["--training.train_iters=2", "--dataset.validation_rows=5", "--dataset.silent=[0, 1, 2]"]
    dense = train(path, "--loss_fn=causal_lm", *common, out=tmp_path / "dense")
    for index, (nproc, overrides) in enumerate(LAYOUTS):
        loss = "--loss_fn={name: chunked_causal_lm, chunk_size: 7}"
        rows = train(path, loss, *common, *overrides, nproc=nproc, out=tmp_path / str(index))
        assert steps(rows) == pytest.approx(steps(dense), abs=1e-5)
        assert steps(rows, "grad_norm") == pytest.approx(steps(dense, "grad_norm"), rel=1e-4)
        assert steps(rows, "tokens") == steps(dense, "tokens")
        assert rows[-1]["eval_loss"] == pytest.approx(dense[-1]["eval_loss"], abs=1e-5)
