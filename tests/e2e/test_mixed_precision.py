"""`mixed_precision: bf16` computes in bf16, with weights and moments in float32; pure bf16 only where it is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hp_core.checkpoint.reading import read_metadata
from hp_core.config.models import MixedPrecisionConfig
from hp_core.testing.ranks import run_ranks
from hp_plugins.optimizers.adamw import AdamW
from tests.e2e.runs import WITH_COMPONENTS, hp_train_here, recipe, steps, train
from tests.model.tiny import LLAMA, a_setup, build, whole

NUM_UPDATES = 1000
RATE = 1e-3
SAVED = ("--training.train_iters=3", "--optimizer.lr=1e-3")


def moved(environment: Any, dtype: str, param_dtype: str | None) -> tuple[torch.Tensor, set[torch.dtype]]:
    """The final norm's weight, 1.0 at first, after updates by `RATE`; and the dtypes of its moments."""
    with a_setup(environment, precision=MixedPrecisionConfig(param_dtype=param_dtype)) as setup:
        model = build(setup, {**LLAMA, "num_hidden_layers": 1}, dtype=dtype)
        weight = model.model.norm.weight
        assert torch.equal(whole(weight), torch.ones_like(whole(weight)))
        optimizer = AdamW(lr=RATE, weight_decay=0.0, model=model).get_optimizer()
        computed: list[torch.dtype] = []
        hook = model.model.norm.register_forward_hook(lambda norm, inputs, output: computed.append(norm.weight.dtype))
        model(torch.arange(10)[None]).logits.float().sum().backward()
        hook.remove()
        assert computed == [torch.bfloat16]
        gradient = torch.ones_like(weight)
        model.zero_grad()
        for _ in range(NUM_UPDATES):
            # Adam moves by its rate, whatever the size of a gradient that is always the same.
            weight.grad = gradient
            optimizer.step()
        state = optimizer.state[weight]
        return whole(weight).detach().clone(), {state[name].dtype for name in ("exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_thousand_small_updates_add_up(num_ranks: int) -> None:
    for weight, moments in run_ranks(moved, num_ranks, "float32", "bfloat16", preload=WITH_COMPONENTS):
        assert weight.dtype == torch.float32
        assert moments == {torch.float32}
        torch.testing.assert_close(weight, torch.full_like(weight, 1 - NUM_UPDATES * RATE), rtol=0, atol=1e-4)


def test_pure_bf16_loses_them_which_is_why_it_must_be_asked_for() -> None:
    weight, moments = moved(None, "bfloat16", None)
    assert weight.dtype == torch.bfloat16
    assert moments == {torch.bfloat16}
    assert torch.equal(weight, torch.ones_like(weight))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_checkpoint_has_float32_and_an_export_what_is_asked_for(tmp_path: Path, num_ranks: int) -> None:
    path = recipe(tmp_path, extra="mixed_precision: bf16\n")
    exact = train(path, "--mixed_precision=fp32", *SAVED, nproc=num_ranks, out=tmp_path / "exact")
    rows = train(path, *SAVED, nproc=num_ranks)
    assert steps(rows) != steps(exact)
    assert steps(rows) == pytest.approx(steps(exact), rel=5e-3)
    metadata = read_metadata(tmp_path / "run" / "checkpoints" / "step_00000003").state_dict_metadata
    dtypes = {name: one.properties.dtype for name, one in metadata.items() if hasattr(one, "properties")}
    assert any(name.endswith("exp_avg_sq") for name in dtypes)
    assert any(name.endswith("lm_head.weight") for name in dtypes)
    floating = {name: dtype for name, dtype in dtypes.items() if dtype.is_floating_point}
    assert set(floating.values()) == {torch.float32}, floating
    for dtype in ("bfloat16", "float32"):
        out = tmp_path / dtype
        done = hp_train_here("export", str(tmp_path / "run"), "--to", str(out), "--dtype", dtype)
        assert done.returncode == 0, done.stderr
        found = load_file(out / "model.safetensors")
        assert {str(value.dtype) for value in found.values()} == {f"torch.{dtype}"}


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("fp16", "expected 'bf16', 'fp32' or a mapping, got the text 'fp16'; fp16 needs a scaled loss, which"),
        ("bf61", "expected 'bf16', 'fp32' or a mapping, got the text 'bf61'; did you mean 'bf16'?"),
        ("true", "expected 'bf16', 'fp32' or a mapping, got the boolean 'true'"),
        ("{param_dtype: float16}", "expected 'float32' or 'bfloat16', got the text 'float16'"),
    ],
)
def test_other_precisions_are_refused_where_they_are_written(tmp_path: Path, written: str, text: str) -> None:
    path = recipe(tmp_path, extra=f"mixed_precision: {written}\ntraining_: {{}}\n")
    done = hp_train_here("check", str(path))
    assert done.returncode == 2
    line, *others = [one for one in done.stderr.splitlines() if "mixed_precision" in one]
    assert line.startswith(f"{path}:21:")
    assert text in line
    assert not others
    assert "training_" in done.stderr


def test_a_word_lies_over_a_base_and_under_a_key(tmp_path: Path) -> None:
    recipe(tmp_path, extra="mixed_precision: bf16\n")
    above = tmp_path / "above.yaml"
    above.write_text("base: tiny.yaml\nmixed_precision: {reduce_dtype: bfloat16}\n")

    def resolved(path: Path, *options: str) -> list[str]:
        lines = hp_train_here("config", str(path), *options).stdout.splitlines()
        at = lines.index("mixed_precision:")
        return [line.split("#")[0].strip() for line in lines[at + 1 : at + 3]]

    assert resolved(above) == ["param_dtype: bfloat16", "reduce_dtype: bfloat16"]
    assert resolved(above, "--mixed_precision=fp32") == ["param_dtype: null", "reduce_dtype: null"]
    assert resolved(above, "--mixed_precision.param_dtype=null") == ["param_dtype: null", "reduce_dtype: bfloat16"]
