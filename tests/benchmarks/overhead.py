"""Tokens per second of `hp-train` over those of a hand-written torch loop on the same model, batches and optimizer.

The trainer runs as in `hp-train`, with metrics every tenth step. `tests/benchmarks/hand_written.py`, a plugin of that
run, takes a step of the loop after each step of the trainer, so that whatever else the machine does hits both alike.
A second run with a model of almost no work shows what the trainer's own part of a step costs in milliseconds.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tests.benchmarks.hand_written import RESULTS

NUM_STEPS = 200
# Caches, allocator and thread pools settle; not timed.
NUM_WARM_UP = 20
LOG_EVERY = 10
ROWS, TOKENS = 4, 256
GOAL = 0.97
# Of the first logged loss. Rounding, which differs, grows by a tenth or so with every step from there.
MAX_LOSS_DIFFERENCE = 1e-5
MAX_LOSS_DIFFERENCE_LATER = 1e-2

RECIPE = f"""\
plugins: [{Path(__file__).with_name("hand_written.py")}]
model:
  name: causal_lm
  config:
    model_type: qwen3
    vocab_size: 4096
    hidden_size: 128
    intermediate_size: 384
    num_hidden_layers: 4
    num_attention_heads: 4
    num_key_value_heads: 2
    head_dim: 32
    tie_word_embeddings: false
dataset: {{name: python_docs, max_files: 20, max_seq_len: {TOKENS}, tokenizer: bytes}}
loss_fn: causal_lm
optimizer: {{name: adamw, lr: 1e-3, weight_decay: 0.1}}
lr_scheduler: {{name: cosine, warmup_steps: 20}}
training:
  train_iters: {NUM_STEPS}
  global_batch_size: {ROWS}
  micro_batch_size: {ROWS}
  log_every: {LOG_EVERY}
  device: cpu
checkpoint: {{save_last: false}}
evaluation: {{at_end: false}}
"""


# The least that has every part of the model: its steps are nearly all host time.
MINIMAL = (
    "--model.config.num_hidden_layers=1",
    "--model.config.hidden_size=16",
    "--model.config.intermediate_size=16",
    "--model.config.head_dim=4",
    "--model.config.vocab_size=257",
    "--dataset.max_seq_len=16",
)


def measure() -> dict[str, Any]:
    minimal = alternate(*MINIMAL)
    result = alternate()
    ratio = result["tokens_per_second_ratio"]
    overhead_ms = minimal["trainer_step_ms"] - minimal["loop_step_ms"]
    return {**result, "goal": GOAL, "reached": ratio >= GOAL, "host_overhead_ms": round(overhead_ms, 3)}


def alternate(*overrides: str) -> dict[str, Any]:
    """One run of both loops; the times of a step and what they say."""
    with tempfile.TemporaryDirectory(prefix="hp-overhead-") as name:
        folder = Path(name)
        os.environ["HP_CACHE_DIR"] = str(folder / "cache")
        run = _train(folder, *overrides)
        found = json.loads((run / RESULTS).read_text())
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = {row["step"]: row["loss"] for row in rows}
    if sorted(logged) != list(range(LOG_EVERY, NUM_STEPS + 1, LOG_EVERY)):
        raise SystemExit(f"the trainer logged steps {sorted(logged)}")
    differences = [abs(logged[step] - found["loop_losses"][step - 1]) for step in sorted(logged)]
    difference = max(differences)
    if differences[0] > MAX_LOSS_DIFFERENCE or difference > MAX_LOSS_DIFFERENCE_LATER:
        raise SystemExit(f"the losses differ by {difference:.2e}: the two loops don't do the same work")
    trainer, loop = found["trainer_seconds"][NUM_WARM_UP:], found["loop_seconds"][NUM_WARM_UP:]
    each = [theirs / ours for ours, theirs in zip(trainer, loop, strict=True)]
    return {
        "tokens_per_second_ratio": round(median(loop) / median(trainer), 4),
        "median_of_step_ratios": round(median(each), 4),
        "trainer_step_ms": round(1000 * median(trainer), 3),
        "loop_step_ms": round(1000 * median(loop), 3),
        "trainer_step_ms_quartiles": [round(1000 * value, 3) for value in quantiles(trainer)],
        "loop_step_ms_quartiles": [round(1000 * value, 3) for value in quantiles(loop)],
        "steps": len(trainer),
        "threads": found["threads"],
        "first_loss_difference": differences[0],
        "max_loss_difference": difference,
        "max_weight_difference": found["max_weight_difference"],
    }


def _train(folder: Path, *overrides: str) -> Path:
    from hp_core.cli.main import main

    recipe, run = folder / "recipe.yaml", folder / "run"
    recipe.write_text(RECIPE)
    if main([str(recipe), f"--output_dir={run}", *overrides]) != 0:
        raise SystemExit("the run failed")
    return run
