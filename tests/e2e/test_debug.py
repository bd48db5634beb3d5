"""Numbers that aren't finite are traced to the module or the operator that they come from."""

from __future__ import annotations

import re

import pytest
import torch

from hp_core.observe.trackers import read_metrics
from hp_core.testing.ranks import RankError
from tests.conftest import ROOT
from tests.e2e.runs import hp_train_here, recipe, steps, train

CHECK = "--debug.check_outputs=true"
DETECT = "--debug.detect_anomaly=true"
ROOT_LOSS = "--loss_fn={_target_: tests.e2e.parts.RootLoss, call: 5}"


OVERFLOWS = f"--plugins=[{ROOT / 'tests' / 'e2e' / 'overflows.py'}]"


def test_the_module_is_named(tmp_path):
    path = str(recipe(tmp_path))
    done = hp_train_here(path, CHECK, OVERFLOWS)
    assert done.returncode == 1
    # Four micro-batches a step, each a row of 16 tokens with 32 numbers a token.
    (line,) = done.stderr.splitlines()
    place = r"step 2, samples \d+: model\.layers\.1\.self_attn \(LlamaAttention\): its output\[0\] is not finite: "
    assert re.match(f"error: {place}3 of 512 numbers are NaN or infinite; it is the first module", line), line
    assert steps(read_metrics(tmp_path / "run"), "step") == [1]
    done = hp_train_here(path, OVERFLOWS, "--overwrite")
    assert "step 2: not finite: the gradient of lm_head.weight and 20 more" in done.stderr


@pytest.mark.parametrize("layout", [[], ["--accelerator.tp_size=2", "--accelerator.sequence_parallel=true"]])
def test_the_rank_is_named(tmp_path, layout):
    with pytest.raises(
        RankError, match=r"rank 1: [^$]*model\.layers\.1\.self_attn \(.*\): its output\[0\] is not finite: 3"
    ):
        train(recipe(tmp_path), CHECK, OVERFLOWS, *layout, nproc=2)


@pytest.mark.filterwarnings("ignore:Error detected in MulBackward0")
def test_the_operator_is_named(tmp_path):
    path = str(recipe(tmp_path))
    done = hp_train_here(path, DETECT, ROOT_LOSS)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("RuntimeError: Function 'MulBackward0' returned nan values")
    assert steps(read_metrics(tmp_path / "run"), "step") == [1]
    assert not torch.is_anomaly_enabled()
    done = hp_train_here(path, ROOT_LOSS, "--overwrite")
    assert "MulBackward" not in done.stderr
    assert "step 2: not finite: the gradient of " in done.stderr


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--activation_checkpoint.mode=full"],
        ["--activation_checkpoint.mode=selective"],
        ["--model.config.model_type=qwen3_moe", "--model.config.num_experts=4", "--model.config.num_experts_per_tok=2"],
    ],
)
def test_a_run_without_faults_has_the_same_numbers(tmp_path, more):
    path = str(recipe(tmp_path))
    for name, debug in (("plain", []), ("checked", [CHECK, DETECT])):
        done = hp_train_here(path, *more, *debug, "--training.train_iters=3", f"--output_dir={tmp_path / name}")
        assert done.returncode == 0, done.stderr
    plain, checked = (read_metrics(tmp_path / name) for name in ("plain", "checked"))
    for name in ("loss", "grad_norm"):
        assert steps(plain, name) == steps(checked, name)
    assert not torch.is_anomaly_enabled()


MOE = [f"--model.config.{one}" for one in ("model_type=qwen3_moe", "num_experts=4", "num_experts_per_tok=2")]


@pytest.mark.parametrize("layout", ["dp", "pp", "cp", "tp", "ep"])
def test_ranks_without_faults_have_the_same_numbers(tmp_path, layout):
    sizes = [] if layout == "dp" else [f"--accelerator.{layout}_size=2"]
    debug = [CHECK] if layout in ("tp", "ep") else [CHECK, DETECT]
    arguments = (*sizes, *(MOE if layout == "ep" else []), "--training.train_iters=2")
    plain = train(recipe(tmp_path), *arguments, nproc=2, out=tmp_path / "plain")
    checked = train(recipe(tmp_path), *arguments, *debug, nproc=2, out=tmp_path / "checked")
    assert steps(plain) == steps(checked)


@pytest.mark.parametrize("size", ["tp_size", "ep_size"])
def test_torch_detects_no_anomaly_where_ranks_share_weights(tmp_path, size):
    done = hp_train_here(str(recipe(tmp_path)), f"--accelerator.{size}=2", "--launch.nproc=2", *MOE, DETECT)
    assert done.returncode == 2
    assert "debug.detect_anomaly: torch can't check gradients of weights that ranks share" in done.stderr


@pytest.mark.parametrize("key", ["check_outputs", "detect_anomaly"])
def test_what_it_does_not_go_with_is_told(tmp_path, key):
    more = ("--training.nonfinite=skip", "--compile.mode=default")
    done = hp_train_here(str(recipe(tmp_path)), f"--debug.{key}=true", *more)
    assert done.returncode == 2
    assert f"debug.{key}: ends the run at what training.nonfinite: skip would leave out" in done.stderr
    assert f"debug.{key}: finds nothing inside a layer that is compiled" in done.stderr
