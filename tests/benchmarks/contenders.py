"""What others would write to train the same model on the same rows: one process each, by turns.

`python -m tests.benchmarks.contenders NAME SPEC.json`, within a benchmark that gives it its turns.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Spec:
    """The work. `model` is a configuration with a `model_type`, or a directory; `rows` a file of `token_rows`."""

    model: Mapping[str, Any] | str
    rows: str
    rows_per_step: int
    num_steps: int
    lr: float
    warm_up: int = 20
    weight_decay: float = 0.1
    log_every: int = 10
    bf16: bool = False
    device: str = "cpu"

    def write(self, path: Path) -> Path:
        """The file that a contender reads."""
        path.write_text(json.dumps(asdict(self)))
        return path


def model_of(spec: Spec) -> Any:
    """The model in float32, as transformers builds it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if isinstance(spec.model, str):
        return AutoModelForCausalLM.from_pretrained(spec.model, dtype=torch.float32, attn_implementation="sdpa")
    torch.manual_seed(0)
    config = AutoConfig.for_model(**spec.model)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def finish(spec: Spec) -> None:
    """Wait for what the device still has to do, so that a step's time is all of it."""
    if spec.device == "cuda":
        import torch

        torch.cuda.synchronize()


def rows_of(spec: Spec) -> Any:
    """The inputs alone: transformers shifts the targets itself."""
    import numpy as np
    import torch

    return torch.from_numpy(np.load(spec.rows)[:, :-1].copy())


def groups_of(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, everything else doesn't."""
    named = list(model.named_parameters())
    decayed = [one for name, one in named if one.ndim > 1 and "embed" not in name]
    others = [one for name, one in named if one.ndim <= 1 or "embed" in name]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def cosine(spec: Spec) -> Callable[[int], float]:
    """The factor of the rate: warm-up, then a cosine down to a tenth."""

    def factor(index: int) -> float:
        step = index + 1
        if step <= spec.warm_up:
            return step / spec.warm_up
        return 0.1 + 0.9 * (1 + math.cos(math.pi * (step - spec.warm_up) / (spec.num_steps - spec.warm_up))) / 2

    return factor


def loop(spec: Spec) -> None:
    """A hand-written loop with the fused optimizer: forward, loss, backward, clipping, update, and no bookkeeping."""
    import torch
    import torch.nn.functional as F

    from tests.benchmarks.turns import Turn

    model, rows = model_of(spec).to(spec.device), rows_of(spec)
    optimizer = torch.optim.AdamW(groups_of(model, spec.weight_decay), lr=spec.lr, betas=(0.9, 0.95), fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(spec))
    pinned = spec.device == "cuda"
    loader = torch.utils.data.DataLoader(rows, batch_size=spec.rows_per_step, shuffle=True, pin_memory=pinned)
    positions = torch.arange(rows.shape[1], device=spec.device).expand(spec.rows_per_step, -1)
    turn, step = Turn(), 0
    while step < spec.num_steps:
        for batch in loader:
            ids = batch.to(spec.device, non_blocking=True)
            with torch.autocast(spec.device, torch.bfloat16, enabled=spec.bf16):
                logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            finish(spec)
            turn.done(float(loss) if step % spec.log_every == 0 else None)
            if step == spec.num_steps:
                break
    turn.end()


def _arguments(spec: Spec, folder: str) -> dict[str, Any]:
    """What the work says to the arguments of transformers' Trainer, and of those that are made of it."""
    return {
        "output_dir": folder,
        "max_steps": spec.num_steps,
        "per_device_train_batch_size": spec.rows_per_step,
        "learning_rate": spec.lr,
        "weight_decay": spec.weight_decay,
        "warmup_steps": spec.warm_up,
        "adam_beta2": 0.95,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "logging_steps": spec.log_every,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": spec.device == "cpu",
        "disable_tqdm": True,
        "bf16": spec.bf16,
    }


def _turns(spec: Spec) -> Any:
    """A callback of transformers' Trainer that takes turns."""
    from transformers import TrainerCallback

    from tests.benchmarks.turns import Turn

    turn = Turn()
    due: list[bool] = []

    class Turns(TrainerCallback):  # type: ignore[misc]
        # A step is logged after it has ended, and its turn ends with what is logged.
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            finish(spec)
            if control.should_log:
                due.append(True)
            else:
                turn.done()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            if due:
                due.clear()
                turn.done(float(logs["loss"]))

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            turn.end()

    return Turns()


def transformers_trainer(spec: Spec) -> None:
    """The Trainer of transformers, with its defaults but for what the work says."""
    from transformers import Trainer, TrainingArguments

    turns = _turns(spec)
    rows = [{"input_ids": row, "labels": row} for row in rows_of(spec)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(**_arguments(spec, folder))
        Trainer(model=model_of(spec), args=arguments, train_dataset=rows, callbacks=[turns]).train()


def lightning(spec: Spec) -> None:
    """Lightning's Trainer around the hand-written loss."""
    import lightning
    import torch

    from tests.benchmarks.turns import Turn

    turn = Turn()

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of(spec)

        def training_step(self, ids: Any, index: int) -> Any:
            logits = self.model(input_ids=ids, use_cache=False).logits
            targets = ids[:, 1:].flatten()
            return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets)

        def configure_optimizers(self) -> Any:
            groups = groups_of(self.model, spec.weight_decay)
            optimizer = torch.optim.AdamW(groups, lr=spec.lr, betas=(0.9, 0.95), fused=True)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(spec))
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    class Turns(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            turn.done(float(outputs["loss"]) if trainer.global_step % spec.log_every == 0 else None)

    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=spec.num_steps,
            # Fused optimizers are refused together with `gradient_clip_val` only under its own mixed precision.
            gradient_clip_val=1.0,
            precision="bf16-mixed" if spec.bf16 else "32-true",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[Turns()],
        )
        loader = torch.utils.data.DataLoader(rows_of(spec), batch_size=spec.rows_per_step, shuffle=True)
        trainer.fit(Module(), loader)
    turn.end()


def trl(spec: Spec) -> None:
    """TRL's SFTTrainer on rows that are tokens already, without packing them again."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    turns, rows = _turns(spec), rows_of(spec)
    with tempfile.TemporaryDirectory() as folder:
        settings = {**_arguments(spec, folder), "max_length": rows.shape[1], "gradient_checkpointing": False}
        SFTTrainer(
            model=model_of(spec),
            args=SFTConfig(**settings),
            train_dataset=Dataset.from_dict({"input_ids": rows.tolist()}),
            processing_class=bytes_tokenizer(Path(folder)),
            callbacks=[turns],
        ).train()


def bytes_tokenizer(folder: Path) -> Any:
    """A tokenizer of transformers for bytes; SFTTrainer wants one, though it has nothing to do."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"<{number:02x}>": number for number in range(256)} | {"<end>": 256}
    Tokenizer(BPE(vocabulary, [])).save(str(folder / "tokenizer.json"))
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<end>", pad_token="<end>")


CONTENDERS: Mapping[str, Callable[[Spec], None]] = {
    "loop": loop,
    "transformers_trainer": transformers_trainer,
    "lightning": lightning,
    "trl": trl,
}
# What a contender needs beside what is installed anyway.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "loop": (),
    "transformers_trainer": ("accelerate",),
    "lightning": ("lightning",),
    "trl": ("trl", "accelerate"),
}


def command(name: str, spec: Path) -> list[str]:
    """The command that runs a contender by turns."""
    return [sys.executable, "-m", "tests.benchmarks.contenders", name, str(spec)]


def missing(name: str) -> str | None:
    """What a contender lacks here, or None."""
    from importlib.util import find_spec

    lacking = [one for one in NEEDS[name] if find_spec(one) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else None


if __name__ == "__main__":
    CONTENDERS[sys.argv[1]](Spec(**json.loads(Path(sys.argv[2]).read_text())))
