"""Tokens per second of `hp-train` over those of a hand-written loop, transformers' Trainer, Lightning and TRL.

Every contender trains the same tiny Qwen3 in float32 on the CPU, on the same rows, with the same fused AdamW, and logs
every tenth step. They are processes that take a step each by turns (`tests.benchmarks.turns`), so that whatever else
the machine does hits all alike. `hyperparallel` is a plain recipe, and so are the others; `hyperparallel_compiled`
compiles its layers. `torchtitan` has no CPU to train on and isn't run.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tests.benchmarks.contenders import CONTENDERS, Spec, command, missing
from tests.benchmarks.token_rows import write_rows
from tests.benchmarks.turns import Timing, alternate, hp_train, ratios

NUM_STEPS = 120
# Caches, allocator and thread pools settle; not timed.
NUM_WARM_UP = 20
ROWS, TOKENS = 4, 256
GOALS = {"loop": 1.0, "transformers_trainer": 1.1, "lightning": 1.05}
# Of the mean of the last three losses that were logged, of 8 at first. The orders of the rows differ, and transformers
# logs the mean of ten steps where the others log the tenth.
MAX_LOSS_DIFFERENCE = 0.1

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
}

RECIPE = """\
model: {{name: causal_lm, {model}}}
dataset: {{_target_: tests.benchmarks.token_rows.token_rows, path: "{rows}"}}
loss_fn: causal_lm
optimizer: {{name: adamw, lr: {lr}, weight_decay: 0.1}}
lr_scheduler: {{name: cosine, warmup_steps: {warm_up}}}
training:
  train_iters: {num_steps}
  global_batch_size: {rows_per_step}
  micro_batch_size: {rows_per_step}
  log_every: {log_every}
  device: {device}
checkpoint: {{save_last: false}}
evaluation: {{at_end: false}}
"""

COMPILED = "--compile.mode=default"


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hp-peers-") as name:
        folder = Path(name)
        spec = tiny_spec(folder, NUM_STEPS)
        recipe = write_recipe(folder, spec)
        commands = {
            "hyperparallel": hp_train(recipe, f"--output_dir={folder / 'run'}"),
            "hyperparallel_compiled": hp_train(recipe, f"--output_dir={folder / 'compiled'}", COMPILED),
        }
        not_run = {"torchtitan": "needs an accelerator"}
        for peer in CONTENDERS:
            if (reason := missing(peer)) is not None:
                not_run[peer] = reason
            else:
                commands[peer] = command(peer, spec.write(folder / "spec.json"))
        found = alternate(commands, {**os.environ, "HP_CACHE_DIR": str(folder / "cache")})
    require_same_work(found)
    plain = ratios(found, "hyperparallel", NUM_WARM_UP)
    return {
        "tokens_per_second_ratio": plain,
        "tokens_per_second_ratio_compiled": ratios(found, "hyperparallel_compiled", NUM_WARM_UP),
        "step_ms": {name: round(1000 * median(one.steps[NUM_WARM_UP:]), 2) for name, one in found.items()},
        "goals": GOALS,
        "reached": {name: plain[name]["median_of_pairs"] >= goal for name, goal in GOALS.items() if name in plain},
        "not_run": not_run,
    }


def tiny_spec(folder: Path, num_steps: int) -> Spec:
    """The tiny Qwen3 and rows for it."""
    rows = folder / "rows.npy"
    write_rows(rows, num_rows=min(num_steps, 200) * ROWS, length=TOKENS)
    return Spec(MODEL, str(rows), ROWS, num_steps, lr=1e-3)


def write_recipe(folder: Path, spec: Spec) -> Path:
    """The recipe of the same work."""
    model = f"pretrained: {spec.model}" if isinstance(spec.model, str) else f"config: {spec.model}"
    values = {
        name: getattr(spec, name)
        for name in ("rows", "lr", "warm_up", "num_steps", "rows_per_step", "log_every", "device")
    }
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(model=model, **values))
    return path


def require_same_work(found: dict[str, Timing]) -> None:
    """Refuse figures of contenders that don't end at about the same loss, or tell none."""
    ends = {name: fmean([one for one in timing.losses if one is not None][-3:]) for name, timing in found.items()}
    ours = ends["hyperparallel"]
    others = {name: end for name, end in ends.items() if abs(end - ours) > MAX_LOSS_DIFFERENCE * ours}
    if others:
        raise SystemExit(f"the losses at the end differ: {ends}; the contenders don't do the same work")
