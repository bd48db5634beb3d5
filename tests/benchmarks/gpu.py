"""What can be measured on one GPU alone: speed against others in bf16, memory, compiling, and waits for the device.

Trains a Qwen3 of 24 layers on the bytes of the standard library. Contenders take a step each by turns. Without a GPU
it says so and measures nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.contenders import Spec, command, missing
from tests.benchmarks.gpu_plugin import RESULTS
from tests.benchmarks.peers import require_same_work, write_recipe
from tests.benchmarks.token_rows import write_rows
from tests.benchmarks.turns import alternate, hp_train, ratios

NUM_STEPS = 40
NUM_WARM_UP = 10
TOKENS = 2048
ROWS = 4

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
BF16 = ("--mixed_precision=bf16", "--loss_fn=chunked_causal_lm")
VARIANTS: Mapping[str, Sequence[str]] = {
    "plain": (),
    "activation_checkpoint": ("--activation_checkpoint.mode=full",),
    "activation_swap": ("--activation_swap.mode=host",),
    "both": ("--activation_checkpoint.mode=full", "--activation_swap.mode=host"),
    "compile": ("--compile.mode=default",),
}


def measure() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"skipped": "no CUDA device is visible"}
    with tempfile.TemporaryDirectory(prefix="hp-gpu-") as name:
        folder = Path(name)
        env = {**os.environ, "HP_CACHE_DIR": str(folder / "cache")}
        rows = folder / "rows.npy"
        write_rows(rows, num_rows=4 * ROWS, length=TOKENS)
        spec = Spec(MODEL, str(rows), ROWS, NUM_STEPS, lr=1e-4, warm_up=5, bf16=True, device="cuda")
        return {
            "device": torch.cuda.get_device_name(),
            "peers": _peers(folder, spec, env),
            "variants": _variants(folder, spec, env),
        }


def _peers(folder: Path, spec: Spec, env: Mapping[str, str]) -> dict[str, Any]:
    recipe = write_recipe(folder, spec)
    commands = {"hyperparallel": hp_train(recipe, *BF16, f"--output_dir={folder / 'peers'}")}
    for peer in ("loop", "transformers_trainer"):
        if missing(peer) is None:
            commands[peer] = command(peer, spec.write(folder / "spec.json"))
    found = alternate(commands, env)
    require_same_work(found)
    return {
        "tokens_per_second_ratio": ratios(found, "hyperparallel", NUM_WARM_UP),
        "step_ms": {name: round(1000 * median(one.steps[NUM_WARM_UP:]), 2) for name, one in found.items()},
        "first_step_s": {name: round(one.start, 2) for name, one in found.items()},
    }


def _variants(folder: Path, spec: Spec, env: Mapping[str, str]) -> dict[str, Any]:
    """Each way to train, in a run of its own: its time, memory, waits, and whether its losses are those of `plain`."""
    recipe = write_recipe(folder, replace(spec, num_steps=NUM_STEPS))
    found: dict[str, Any] = {}
    losses: dict[str, list[float]] = {}
    for name, options in VARIANTS.items():
        run = folder / name
        options = (*BF16, *options, f"--output_dir={run}", "--training.log_every=10")
        done = subprocess.run(
            hp_train(recipe, *options, plugin="gpu_plugin.py"), env=env, capture_output=True, text=True
        )
        if done.returncode != 0:
            found[name] = {"failed": done.stderr.strip().splitlines()[-3:]}
            continue
        found[name] = json.loads((run / RESULTS).read_text())
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [row["loss"] for row in rows if "loss" in row]
        found[name]["mfu"] = rows[-1].get("mfu")
    for name, values in losses.items() if "plain" in losses else ():
        pairs = zip(values, losses["plain"], strict=True)
        found[name]["largest_loss_difference"] = max(abs(one - other) / other for one, other in pairs)
    return found
