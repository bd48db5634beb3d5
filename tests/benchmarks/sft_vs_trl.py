"""Supervised tokens per second of instruction tuning, over those of TRL's SFTTrainer, on the same model and chats.

SmolLM2-135M-Instruct in fp32 on the CPU, one question and its answer in each chat, only answers trained on both sides.
TRL runs with its defaults (but fp32) and with each of its packing settings that runs here, without gradient
checkpointing; the fastest of those counts. `wrapped` cuts chats and lets those of a row see each other, which is other
work: the fastest that keeps them apart has a ratio of its own. Every contender is a process of its own, and they take
turns, so that whatever else the machine does hits all alike. Needs `trl`, `gguf` and `accelerate`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROUNDS = 2
NUM_STEPS = 8
# Threads, allocator and the first batch; not timed.
NUM_WARM_UP = 2
LENGTH = 1024
# Packing without isolation.
SEES_OTHERS = {"packing_wrapped"}
GOALS = {"defaults": 2.0, "packing": 1.2}

RECIPE = f"""\
model: {{name: causal_lm, pretrained: model}}
dataset:
  name: chat
  files: chats.jsonl
  format: prompt_completion
  max_seq_len: {LENGTH}
  packing: best_fit
  tokenizer: {{name: pretrained, path: model}}
plan_overrides: [{{match: "*.self_attn", replace_module: sdpa_attention}}]
loss_fn: chunked_causal_lm
optimizer: {{name: adamw, lr: 2e-5}}
training:
  train_iters: {NUM_STEPS}
  global_batch_size: 1
  micro_batch_size: 1
  log_every: 1
  device: cpu
checkpoint: {{save_last: false}}
evaluation: {{at_end: false}}
"""

# What is changed of SFTConfig's defaults.
TRL: dict[str, dict[str, Any]] = {
    "defaults": {},
    "packing_bfd": {"packing": True, "per_device_train_batch_size": 1, "gradient_checkpointing": False},
    "packing_bfd_512": {
        "packing": True,
        "per_device_train_batch_size": 2,
        "max_length": 512,
        "gradient_checkpointing": False,
    },
    "packing_wrapped": {
        "packing": True,
        "packing_strategy": "wrapped",
        "per_device_train_batch_size": 1,
        "gradient_checkpointing": False,
    },
}


def measure() -> dict[str, Any]:
    missing = [name for name in ("trl", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        return {"skipped": f"not installed: {', '.join(missing)}"}
    with tempfile.TemporaryDirectory(prefix="hp-sft-") as name:
        folder = Path(name)
        prepare(folder)
        speeds: dict[str, list[float]] = {}
        faults: dict[str, str] = {}
        for _ in range(ROUNDS):
            for contender in ("hyperparallel", *TRL):
                if contender not in faults:
                    try:
                        speeds.setdefault(contender, []).extend(run_apart(contender, folder))
                    except RuntimeError as error:
                        faults[contender] = str(error)
    if "hyperparallel" in faults or "defaults" in faults:
        raise SystemExit("\n".join(faults.values()))
    found = {contender: median(each) for contender, each in speeds.items() if contender not in faults}
    packing = {contender: speed for contender, speed in found.items() if contender.startswith("packing")}
    ratios = {"defaults": found["hyperparallel"] / found["defaults"]}
    if packing:
        ratios["packing"] = found["hyperparallel"] / max(packing.values())
    apart = {contender: speed for contender, speed in packing.items() if contender not in SEES_OTHERS}
    if apart:
        ratios["packing_apart"] = found["hyperparallel"] / max(apart.values())
    return {
        **{f"tokens_per_second_ratio_{name}": round(ratio, 3) for name, ratio in ratios.items()},
        "best_packing": max(packing, key=packing.__getitem__) if packing else None,
        "supervised_tokens_per_second": {contender: round(speed, 1) for contender, speed in found.items()},
        "goals": GOALS,
        "reached": {name: ratios.get(name, 0.0) >= goal for name, goal in GOALS.items()},
        "not_run": faults,
    }


def prepare(folder: Path) -> None:
    """The example's model and chats, the first question of each chat only, in the form that both sides read."""
    script = Path(__file__).parents[2] / "examples" / "smollm2_sft" / "prepare.py"
    subprocess.run([sys.executable, str(script)], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    made = folder / "smollm2_sft"
    (made / "model").rename(folder / "model")
    chats = [json.loads(line)["messages"] for line in (made / "chats.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = [json.dumps({"prompt": chat[:1], "completion": chat[1:2]}) + "\n" for chat in chats]
    (folder / "chats.jsonl").write_text("".join(lines), encoding="utf-8")


def run_apart(contender: str, folder: Path) -> list[float]:
    """Supervised tokens per second of each timed step. Raises `RuntimeError` if the contender doesn't run."""
    command = [sys.executable, "-m", "tests.benchmarks.sft_vs_trl", contender, str(folder)]
    environment = {**os.environ, "HP_CACHE_DIR": str(folder / "cache"), "HF_HOME": str(folder / "hf")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{contender}: {done.stderr.strip().splitlines()[-1] if done.stderr else done.returncode}")
    speeds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return speeds[NUM_WARM_UP:]


def train_ours(folder: Path) -> list[float]:
    from hp_core.cli.main import main

    os.chdir(folder)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        recipe, run = Path(name) / "recipe.yaml", Path(name) / "run"
        recipe.write_text(RECIPE)
        if main([str(recipe), f"--output_dir={run}"]) != 0:
            raise SystemExit("the run failed")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["tokens"] / row["step_time_s"] for row in rows if "step_time_s" in row]


def train_trl(folder: Path, changes: dict[str, Any]) -> list[float]:
    import time

    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Timer(TrainerCallback):
        def __init__(self) -> None:
            self.started = 0.0
            self.speeds: list[float] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.speeds.append(targets.pop() / (time.perf_counter() - self.started))

    class Trainer(SFTTrainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *rest: Any, **kwargs: Any) -> Any:
            targets.append(int((inputs["labels"][:, 1:] != -100).sum()))
            return super().training_step(model, inputs, *rest, **kwargs)

    targets: list[int] = []
    timer = Timer()
    with tempfile.TemporaryDirectory(dir=folder) as name:
        settings: dict[str, Any] = {"bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no"}
        settings |= {"max_steps": NUM_STEPS, "output_dir": name, "disable_tqdm": True, **changes}
        trainer = Trainer(
            model=str(folder / "model"),
            args=SFTConfig(**settings),
            train_dataset=load_dataset("json", data_files=str(folder / "chats.jsonl"), split="train"),
            callbacks=[timer],
        )
        trainer.train()
    return timer.speeds


def main() -> None:
    contender, folder = sys.argv[1], Path(sys.argv[2])
    speeds = train_ours(folder) if contender == "hyperparallel" else train_trl(folder, TRL[contender])
    print(json.dumps(speeds))


if __name__ == "__main__":
    main()
