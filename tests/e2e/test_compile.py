"""Runs of compiled layers: resumed, from the cache, evaluated, in bf16, and on a machine without a compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_core.observe.trackers import read_metrics
from tests.e2e.runs import hp_train, manifest, recipe, steps, train

DROPS = "--model.config.attention_dropout=0.2"
COMPILED = "--compile.mode=default"


def test_a_resumed_run_equals_the_unbroken_one_and_finds_its_code_in_the_cache(tmp_path: Path) -> None:
    path, env = recipe(tmp_path), {"HP_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}

    def run(out: Path, *overrides: str) -> dict[str, float]:
        done = hp_train(str(path), DROPS, COMPILED, f"--output_dir={out}", *overrides, env=env)
        assert done.returncode == 0, done.stderr
        facts: dict[str, float] = manifest(out)["compile"]
        return facts

    cold = run(tmp_path / "unbroken")
    out = tmp_path / "broken"
    warm = [run(out, "--training.stop_after=3"), run(out, "--checkpoint.resume=latest")]
    assert (cold["graphs"], cold["from_cache"]) == (1, 0)
    assert all(one["from_cache"] == cold["not_in_cache"] > 0 for one in warm)
    assert all(one["not_in_cache"] == 0 and one["seconds"] < cold["seconds"] / 2 for one in warm)
    unbroken, broken, plain = (
        read_metrics(tmp_path / "unbroken"),
        read_metrics(out),
        train(path, DROPS, out=tmp_path / "plain"),
    )
    for name in ("step", "loss", "grad_norm", "tokens"):
        assert steps(broken, name) == steps(unbroken, name), name
    # Adam makes of each rounding of a small gradient a step, so runs drift apart.
    assert steps(unbroken) == pytest.approx(steps(plain), rel=1e-5)


def test_a_machine_without_a_compiler_is_refused_or_runs_layers_as_they_are_written(tmp_path: Path) -> None:
    path, out = recipe(tmp_path), tmp_path / "eager"
    env = {"HP_CACHE_DIR": str(tmp_path / "cache"), "CXX": "no-such-compiler"}
    refused = hp_train(str(path), COMPILED, env=env)
    assert refused.returncode == 2
    assert "compile.backend: inductor needs a C++ compiler" in refused.stderr
    assert "install g++, let CXX name another, or write compile.on_failure: eager" in refused.stderr
    went_on = hp_train(str(path), COMPILED, "--compile.on_failure=eager", f"--output_dir={out}", env=env)
    assert went_on.returncode == 0, went_on.stderr
    line = "compile: model.layers.0 can't be compiled, and it and all alike run as they are written: InvalidCxxCompiler"
    assert went_on.stdout.count(line) == 1
    assert manifest(out)["compile"]["graphs"] == 0
    assert steps(read_metrics(out)) == steps(train(path, out=tmp_path / "plain"))


@pytest.mark.parametrize("nproc", [1, 2])
def test_in_bf16_and_evaluated_it_is_the_same_run(tmp_path: Path, nproc: int) -> None:
    path = recipe(tmp_path)
    asked = ("--mixed_precision=bf16", "--dataset.validation_rows=5", "--evaluation.every=3")
    plain = train(path, *asked, nproc=nproc, out=tmp_path / "plain")
    rows = train(path, *asked, COMPILED, "--compile.backend=aot_eager", nproc=nproc, out=tmp_path / "compiled")
    assert manifest(tmp_path / "compiled")["compile"]["graphs"] >= 1
    for name in ("loss", "eval_loss"):
        found, wanted = ([row[name] for row in each if name in row] for each in (rows, plain))
        assert found == pytest.approx(wanted, rel=2e-3), name
        assert len(found) >= 2
