"""Micro-batches that are only as long as their longest row give the numbers of whole rows, on every layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hp_core.data.protocols import Sample
from tests.e2e.runs import steps, train

RECIPE = """\
model:
  name: causal_lm
  config: {{model_type: qwen3_moe, vocab_size: 260, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
           num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, num_experts: 4, num_experts_per_tok: 2,
           moe_intermediate_size: 16, max_position_embeddings: 64, router_aux_loss_coef: 0.1,
           output_router_logits: true}}
dataset:
  name: text
  files: {folder}/texts.jsonl
  max_seq_len: 40
  packing: none
  length_policy: drop
  validation_fraction: 0.2
  cache_dir: {folder}/cache
  tokenizer: bytes
loss_fn: causal_lm
optimizer: {{name: sgd, lr: 0.1}}
training: {{train_iters: 3, global_batch_size: 6, micro_batch_size: 1, seed: 3}}
output_dir: {folder}/run
"""
WHOLE_ROWS = "--dataloader.collate_fn={_target_: tests.equivalence.test_lengths.whole_rows}"


def whole_rows() -> Callable[[Sequence[Sample]], dict[str, torch.Tensor]]:
    def collate(samples: Sequence[Any]) -> dict[str, torch.Tensor]:
        batch = {
            name: torch.from_numpy(np.stack([one[name] for one in samples])) for name in samples[0] if name != "index"
        }
        return {**batch, "sample_ids": torch.tensor([one["index"] for one in samples])}

    return collate


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lengths")
    texts = ["a text of many words: " + "word " * (number % 5) for number in range(24)]
    texts[::3] = [text[:7] + str(number) for number, text in enumerate(texts[::3])]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder))
    return recipe


@pytest.fixture(scope="module")
def whole(path: Path) -> list[dict[str, Any]]:
    return train(path, WHOLE_ROWS, out=path.parent / "whole")


@pytest.mark.parametrize(
    ("layout", "nproc"),
    [
        ((), 1),
        (("--training.micro_batch_size=3",), 1),
        (("--accelerator.ep_size=2",), 2),
        (("--accelerator.cp_size=2",), 2),
        (("--accelerator.pp_size=2",), 2),
        (("--accelerator.tp_size=2", "--accelerator.sequence_parallel=true"), 2),
    ],
    ids=["one", "micro-batches of three", "experts", "context", "pipeline", "tensor"],
)
def test_lengths_do_not_show_in_the_numbers(
    path: Path, whole: list[dict[str, Any]], layout: tuple[str, ...], nproc: int, tmp_path: Path
) -> None:
    found = train(path, *layout, nproc=nproc, out=tmp_path / "run")
    assert steps(found) == pytest.approx(steps(whole), abs=1e-5)
    assert steps(found, "grad_norm") == pytest.approx(steps(whole, "grad_norm"), rel=1e-4)
    assert steps(found, "tokens") == steps(whole, "tokens")
    (evaluated,), (expected,) = ([row["eval_loss"] for row in rows if "eval_loss" in row] for rows in (found, whole))
    assert evaluated == pytest.approx(expected, abs=1e-5)
