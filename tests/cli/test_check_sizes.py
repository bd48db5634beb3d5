"""Sizes that don't fit: all of them in one go, each with what would work, before any process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import hp_train_here, recipe

MOE = (
    "--model.config={model_type: qwen3_moe, vocab_size: 96, hidden_size: 48, num_hidden_layers: 2, head_dim: 8, "
    "num_attention_heads: 4, num_key_value_heads: 2, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16}"
)
EAGER = "--model.attn_implementation=eager"
TIED = "--model.config={model_type: llama, num_hidden_layers: 4, tie_word_embeddings: true}"
DENSE = "--model.config.intermediate_size=50"


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        pytest.param(
            [DENSE, "--launch.nproc=6", "--accelerator.tp_size=3", "--fsdp_config.dp_replicate_size=4"],
            [
                "fsdp_config: dp_replicate_size 4 does not make 2 ranks; replicate x shard that would: 1 x 2, 2 x 1",
                "accelerator.tp_size: 4 attention heads can't be shared by 3 ranks; use 1 or 2",
                "accelerator.tp_size: 2 key and value heads can't be shared by 3 ranks; use 1 or 2",
                "accelerator.tp_size: an MLP of width 50 can't be shared by 3 ranks; use 1 or 2",
                "training.global_batch_size: 5 rows can't be cut into micro-batches of 1 on 2 data ranks (--nproc 6); "
                "use a multiple of 2: 4 or 6",
            ],
            id="replicas, heads, width and batch",
        ),
        pytest.param(
            [MOE, "--launch.nproc=3", "--accelerator.ep_size=3"],
            [
                "accelerator.ep_size: 4 experts can't be divided among 3 ranks; ep_size that would: 1, 2, 4",
                "training.global_batch_size: 5 rows can't be cut into micro-batches of 1 on 3 data ranks (--nproc 3); "
                "use a multiple of 3: 3 or 6",
            ],
            id="experts and batch",
        ),
        pytest.param(
            [
                "--launch.nproc=10",
                "--accelerator.pp_size=5",
                "--accelerator.cp_size=2",
                "--accelerator.ep_size=2",
                "--model.attn_implementation=eager",
                "--accelerator.pp_layers=[1, 1]",
            ],
            [
                "accelerator.pp_layers: 2 stages are given layers, and there are 5; write 5 numbers",
                "accelerator.ep_size: a llama has no experts to spread; remove 'ep_size'",
                "accelerator.pp_size: 5 stages need as many layers, and the model has 2; pp_size that would: 1, 2",
                "accelerator.cp_size: context parallelism needs the attention of torch, and the model uses 'eager'; "
                "write model.attn_implementation: sdpa",
            ],
            id="layers, experts of a dense model, and attention",
        ),
        pytest.param(
            [
                "--launch.nproc=2",
                "--accelerator={pp_size: 2, pp_schedule: zbv_zero_bubble}",
                "--model.config={model_type: llama, num_hidden_layers: 4, tie_word_embeddings: true}",
            ],
            [
                "accelerator.pp_schedule: zbv_zero_bubble has the first and the last stage on one rank, which ties "
                "their weights; use another schedule for a model whose embedding is its head",
            ],
            id="tied ends on one rank",
        ),
        pytest.param(
            [MOE, "--launch.nproc=5", "--accelerator.tp_size=3", "--accelerator.cp_size=2"],
            [
                "accelerator: cp_size 2 x tp_size 3 needs a multiple of 6 ranks, and there are 5; "
                "start 6, 12, 18, 24 … ranks, or make the product one of 1, 5",
                "accelerator.tp_size: 4 attention heads can't be shared by 3 ranks; use 1, 2 or 4",
                "accelerator.tp_size: 2 key and value heads can't be shared by 3 ranks; use 1, 2 or 4",
            ],
            id="world and heads",
        ),
        pytest.param(
            [
                MOE,
                "--launch.nproc=2",
                "--accelerator.ep_size=4",
                "--fsdp_config={dp_replicate_size: 2, forward_prefetch: 1}",
            ],
            [
                "accelerator.ep_size: 4 does not divide dp_shard_size 1 x cp_size 1, the ranks that experts can be "
                "spread over; ep_size that would: 1",
                "fsdp_config.forward_prefetch: each rank holds all of the parameters that it computes with, so none "
                "are gathered; remove 'forward_prefetch', or start more data ranks",
                "training.global_batch_size: 5 rows can't be cut into micro-batches of 1 on 2 data ranks (--nproc 2); "
                "use a multiple of 2: 4 or 6",
            ],
            id="spread, prefetch and batch",
        ),
    ],
)
def test_all_that_does_not_fit_is_told_at_once(tmp_path: Path, overrides: list[str], lines: list[str]) -> None:

    done = hp_train_here("check", str(recipe(tmp_path)), *overrides, "--training.global_batch_size=5")
    assert done.returncode == 2
    found = done.stderr.splitlines()
    assert len(found) == len(lines), done.stderr
    assert [line for line in lines if not any(line in one for one in found)] == []


def test_the_number_of_processes_is_written_as_for_training(tmp_path: Path) -> None:
    done = hp_train_here("check", str(recipe(tmp_path)), "--nproc", "3", "--accelerator.tp_size=2")
    assert done.returncode == 2
    assert "accelerator: tp_size 2 needs a multiple of 2 ranks, and there are 3" in done.stderr
