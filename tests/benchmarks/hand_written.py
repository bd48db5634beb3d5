"""A plugin that takes a step of a hand-written loop after each of the trainer's, on the same batches, and times both.

The trainer's time runs from the end of one `on_step_end` to the beginning of the next, so it holds everything that the
trainer does around a step: its loop, hooks, counting, checks, metrics and trackers.
"""

from __future__ import annotations

import copy
import json
import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from hp_core.hookspecs import hookimpl

RESULTS = "hand_written.json"


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    names = ("input_ids", "position_ids", "labels")
    return {name: torch.stack([torch.from_numpy(sample[name]) for sample in samples]) for name in names}


class HandWrittenLoop:
    """What a careful user would write: AdamW with two groups, warm-up and cosine, clipping, no bookkeeping."""

    def __init__(self, model: torch.nn.Module, loader: DataLoader[Any], recipe: Any) -> None:
        self.model = copy.deepcopy(model)
        self.batches = iter(loader)
        self.max_grad_norm = recipe.training.max_grad_norm
        decayed = [p for name, p in self.model.named_parameters() if p.ndim > 1 and "embed" not in name]
        others = [p for name, p in self.model.named_parameters() if p.ndim <= 1 or "embed" in name]
        settings = dict(recipe.optimizer.arguments)
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True, **settings)
        warmup, total = recipe.lr_scheduler.arguments["warmup_steps"], recipe.training.train_iters

        def factor(index: int) -> float:
            step = index + 1
            if step <= warmup:
                return step / warmup
            return 0.1 + 0.9 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2

        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    def step(self) -> torch.Tensor:
        batch = next(self.batches)
        labels = batch["labels"].flatten()
        output = self.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
        loss = F.cross_entropy(output.logits.flatten(0, 1).float(), labels, ignore_index=-100, reduction="sum")
        loss = loss / (labels != -100).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


class Alternation:
    """Both loops' times and losses, step by step."""

    def __init__(self) -> None:
        self.loader: DataLoader[Any] | None = None
        self.loop: HandWrittenLoop | None = None
        self.ended = 0.0
        self.trainer_seconds: list[float] = []
        self.loop_seconds: list[float] = []
        self.losses: list[torch.Tensor] = []
        self.trainer_losses: dict[int, float] = {}

    @hookimpl(wrapper=True)
    def build_dataloader(self, dataset: Any, batch_sampler: Any) -> Any:
        self.loader = self.loader or DataLoader(dataset, batch_sampler=list(batch_sampler), collate_fn=collate)
        return (yield)

    @hookimpl
    def on_train_start(self, run: Any) -> None:
        assert self.loader is not None
        self.loop = HandWrittenLoop(run.model, self.loader, run.config)
        self.ended = time.perf_counter()

    @hookimpl
    def on_step_end(self, run: Any, step: int) -> None:
        assert self.loop is not None
        started = time.perf_counter()
        self.trainer_seconds.append(started - self.ended)
        self.losses.append(self.loop.step())
        self.ended = time.perf_counter()
        self.loop_seconds.append(self.ended - started)

    @hookimpl
    def on_train_end(self, run: Any) -> None:
        assert self.loop is not None
        pairs = zip(run.model.parameters(), self.loop.model.parameters(), strict=True)
        results = {
            "trainer_seconds": self.trainer_seconds,
            "loop_seconds": self.loop_seconds,
            "loop_losses": [float(loss) for loss in self.losses],
            "max_weight_difference": max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs),
            "threads": torch.get_num_threads(),
        }
        (run.directory.path / RESULTS).write_text(json.dumps(results))


_alternation = Alternation()
build_dataloader = _alternation.build_dataloader
on_train_start = _alternation.on_train_start
on_step_end = _alternation.on_step_end
on_train_end = _alternation.on_train_end
